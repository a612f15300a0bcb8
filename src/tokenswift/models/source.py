"""How models are opened: from their files, or as models of transformers.

A model folder or GGUF file of a supported family is read without transformers; its own model and
tokenizer are loaded only when asked for. Everything else (other families, devices without kernels,
model objects) runs through transformers.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, Required

import torch
from torch import Tensor

from tokenswift.checks import check_callback, shown
from tokenswift.config.loading import LoadConfig, RopeScaling, check_backend
from tokenswift.config.sampling import ANSWERS, SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.kernels.formats import FORMATS, Stored
from tokenswift.loader.chat_template import prepare
from tokenswift.loader.ends import (
    end_ids,
    end_tokens,
    turn_ends,
    unnamed_rows,
    without_message_ends,
)
from tokenswift.loader.find import locate, short_name
from tokenswift.loader.guards import check_memory, fitting
from tokenswift.loader.host import HeadsHost, holds_heads, host_of
from tokenswift.loader.identity import (
    base_of_weights,
    digest_of,
    identity_of,
    parameters,
    tokenizer_digest,
)
from tokenswift.loader.load import check_place, load_located, load_tokenizer, model_of
from tokenswift.loader.named_sampling import named_sampling, usable_sampling
from tokenswift.loader.opened import Opened, open_files
from tokenswift.loader.weights import Weights, drafting_weights
from tokenswift.models.base import ComputeIdentity
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import (
    Target,
    backend_for,
    backend_with_states,
    check_model,
    make_target,
)
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError, OnProgress

logger = logging.getLogger("tokenswift")


class ModelIdentity(ComputeIdentity):
    """What of a model decides its tokens: its type, digests, the wish for YaRN, and how it is
    computed."""

    dtype: Required[str]
    config: Required[str]
    weights: Required[str]
    tokenizer: Required[str | None]
    rope: Required[str]


class Source(ABC):
    """What a target is made from: a loaded transformers model (`FromModel`), or files
    (`FromFiles`).

    Attributes:
        name: the model's name as given.
        host: the properties that draft heads must fit.
        scaling: the wish for YaRN.
        backend: the backend that computes.
        named: sampling settings in the model's own generation config.
    """

    def __init__(
        self,
        name: str,
        host: HeadsHost,
        scaling: RopeScaling | None,
        backend: Backend,
        named: Mapping[str, object],
    ) -> None:
        self.name = name
        self.host = host
        self.scaling = scaling
        self.backend = backend
        self.named = named

    @property
    @abstractmethod
    def model(self) -> Any:
        """The transformers model."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in use."""

    @property
    @abstractmethod
    def transformers_tokenizer(self) -> Tokenizer | None:
        """The tokenizer as transformers has it."""

    @cached_property
    def identity(self) -> ModelIdentity:
        """The properties of the model that decide the tokens."""
        digests = self._identity()
        return ModelIdentity(
            dtype=digests["dtype"],
            config=digests["config"],
            weights=digests["weights"],
            tokenizer=tokenizer_digest(self.tokenizer),
            rope=str(self.scaling or "none"),
        )

    @abstractmethod
    def _identity(self) -> dict[str, str]:
        """The type and the digests of config and weights."""

    @property
    def drafting(self) -> Weights | None:
        """The weights of a layer that drafts, which the model's own files bring; None: they bring
        none."""
        return None

    def end_tokens(self) -> set[int]:
        """End-of-text ids within the model's vocabulary."""
        ends, rows = self._ends()
        ends = without_message_ends(ends | self._turn_ends, self.tokenizer)
        return {token for token in ends if 0 <= token < rows}

    def unnamed_rows(self) -> list[int]:
        """Rows of the LM head that no token names."""
        return unnamed_rows(self.tokenizer, self._ends()[1])

    @abstractmethod
    def _ends(self) -> tuple[set[int], int]:
        """The model's end-of-text ids, and its vocabulary size."""

    @cached_property
    def _turn_ends(self) -> set[int]:
        return turn_ends(self.tokenizer)

    @cached_property
    def answers(self) -> SamplingParams:
        """Default sampling for chat: the model's own settings that are valid, else
        `config.ANSWERS`."""
        return usable_sampling(self.named, self.name) or ANSWERS

    @abstractmethod
    def weight(self, name: str) -> Tensor | Stored:
        """A weight by transformers' name of it, as it is stored.

        Raises:
            InputError: the model has none of this name.
        """

    @abstractmethod
    def target(self, on_progress: OnProgress | None = None) -> Target:
        """Make the target.

        Raises:
            RunError: the device has no room for it.
        """


class FromModel(Source):
    """A loaded model.

    Args:
        model: a causal LM of transformers.
        tokenizer: its tokenizer, or None.
        scaling: the wish for YaRN.
        backend: the backend that computes.
    Raises:
        InputError: it is no such model.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer | None, scaling: RopeScaling | None, backend: Backend
    ) -> None:
        check_model(model)
        super().__init__(
            name=getattr(model, "name_or_path", ""),
            host=host_of(model),
            scaling=scaling,
            backend=backend,
            named=named_sampling(getattr(model, "generation_config", None)),
        )
        self._model = model
        self._tokenizer = tokenizer

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the model."""
        return self._tokenizer

    @property
    def transformers_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the model."""
        return self._tokenizer

    def _identity(self) -> dict[str, str]:
        model = self._model
        return identity_of(model.config, model.dtype, parameters(model))

    def _ends(self) -> tuple[set[int], int]:
        return end_tokens(self._model, self._tokenizer), self._model.lm_head.weight.shape[0]

    def weight(self, name: str) -> Tensor | Stored:
        """See :class:`Source`."""
        return attrgetter(name)(self._model)

    def target(self, on_progress: OnProgress | None = None) -> Target:
        """See :class:`Source`."""
        with fitting(self.name, self.host.device):
            return make_target(self._model, self.scaling, on_progress, self.backend)


class FromFiles(Source):
    """A model read from its files.

    Args:
        files: the opened files.
        how: the options of loading.
        backend: the backend that computes.
    Raises:
        InputError: the weights do not fit into memory.
    """

    def __init__(self, files: Opened, how: LoadConfig, backend: Backend) -> None:
        prepare()  # the first text asks its template where turns end
        layers = files.weights.layout.num_hidden_layers
        base = base_of_weights(files.weights.raw, layers, short_name(str(files.folder)))
        super().__init__(
            name=files.name,
            host=HeadsHost(base, files.weights.dtype, backend.device, str(files.folder)),
            scaling=how.scaling,
            backend=backend,
            named=dict(files.sampling),
        )
        self._files = files
        self._how = how
        check_memory(files.name, files.weights.needed(backend.keeps), str(backend.device))
        if how.weights in FORMATS:
            line = (
                "model %s is quantized to %s, which makes it another model; exactness is "
                "relative to that"
            )
            logger.warning(line, files.name, how.weights)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The library's own tokenizer, or transformers' where it has none.

        Raises:
            InputError: the tokenizer cannot be made.
        """
        return self._files.tokenizer() or self.transformers_tokenizer

    @cached_property
    def transformers_tokenizer(self) -> Tokenizer | None:
        """transformers' own tokenizer, loaded now.

        Raises:
            InputError: the files have changed.
        """
        self._files.check_unchanged()
        return load_tokenizer(self._files.name, self._files.folder)

    @cached_property
    def model(self) -> Any:
        """transformers' own model, loaded now: from then on the weights take twice the memory.

        Raises:
            InputError: the files have changed.
        """
        files = self._files
        device = str(self.backend.device)
        files.check_unchanged()
        if self._how.weights == "stored":
            return load_located(files.name, files.folder, self._how, device).model
        return model_of(files).to(device)

    @property
    def drafting(self) -> Weights | None:
        """See :class:`Source`."""
        weights = self._files.weights
        return drafting_weights(weights)

    def weight(self, name: str) -> Tensor | Stored:
        """See :class:`Source`."""
        weight = self._files.weights.get(name)
        if weight is None:
            raise InputError(f"the model has no weight {name}")
        return weight

    def target(self, on_progress: OnProgress | None = None) -> Target:
        """See :class:`Source`."""
        weights = self._files.weights
        if on_progress is not None:
            for done in (0, len(weights.entries)):  # tensors are read while they are packed
                on_progress("load", done, len(weights.entries))
        with fitting(self.name, self.host.device):
            return NativeTarget(weights, self.backend, self._files.rotary, on_progress=on_progress)

    def _identity(self) -> dict[str, str]:
        files = self._files
        kind = self._how.weights
        files.check_unchanged()
        named = ((name, entry.get()) for name, entry in sorted(files.weights.entries.items()))
        identity = identity_of(files.config, files.weights.dtype, named)
        if kind not in ("stored", "float32", identity["dtype"]):
            identity["weights"] = digest_of([identity["weights"], kind], 32)
        return identity

    def _ends(self) -> tuple[set[int], int]:
        ends = set(self._files.ends) | end_ids(self.tokenizer)
        return ends, self._files.weights.layout.vocab_size


def open_model(
    model: str | os.PathLike[str], how: LoadConfig, on_progress: OnProgress | None = None
) -> Source:
    """Open a model by name.

    Args:
        model: the name, see `loader.load.load`.
        on_progress: called with the stages "fetch", "compile" and "load".
    Raises:
        InputError, RunError: as of `loader.load.load`.
    """
    if not isinstance(model, str | os.PathLike):
        valid = "alias, folder or hub id (LLM.from_model takes a loaded model)"
        raise InputError(f"model is of type {type(model).__name__}; valid: {valid}")
    check_callback("on_progress", on_progress)
    if how.threads is not None:
        torch.set_num_threads(how.threads)
    name = str(model)
    device = check_place(how)
    folder = locate(name, on_progress)
    backend = backend_for(device, how.backend, on_progress)
    if not (folder.is_dir() and holds_heads(folder)):
        files = open_files(name, folder, how, device)
        layout = None if files is None else files.weights.layout
        if layout is not None and layout.recurrence is not None:
            backend = backend_with_states(backend)
        has_layers = layout is not None and (backend.mixtures or layout.mixture is None)
        if files is not None and backend.decodes and has_layers:
            return FromFiles(files, how, backend)
    if how.weights != "stored":
        line = f"weights is {how.weights!r}, but model {name} runs through transformers' own model"
        raise InputError(f"{line} here; valid: stored", "weights")
    loaded = load_located(name, folder, how, device)
    return FromModel(loaded.model, loaded.tokenizer, how.scaling, backend)


def wrap_model(model: Any, tokenizer: Tokenizer | None, how: LoadConfig) -> Source:
    """Wrap a loaded transformers model, which stays as it is.

    Raises:
        InputError: it is no such model, its tokenizer is none, or it does not run here as is asked
            for.
    """
    if isinstance(model, str | os.PathLike):
        raise InputError(
            f"model is {str(model)!r}; valid: a loaded transformers model (LLM takes a name)"
        )
    check_model(model)
    if tokenizer is not None and not callable(tokenizer):
        raise InputError(
            f"tokenizer is {shown(tokenizer)}; valid: None, or a tokenizer of transformers"
        )
    if getattr(model, "_tp_size", None):
        raise InputError(
            "the model is spread over ranks; valid: a model of one process, with a device_map"
        )
    from tokenswift.models.generic import device_of

    device = device_of(model.lm_head)
    check_backend(how.backend, str(device))
    backend = backend_for(device, how.backend)
    return FromModel(model, tokenizer, how.scaling, backend)
