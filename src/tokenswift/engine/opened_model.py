"""A model that has been opened: loading it, what it holds, and closing it."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch

from tokenswift.checks import meant
from tokenswift.config.loading import (
    Backend,
    Device,
    Dtype,
    HeadKind,
    LoadArguments,
    LoadConfig,
    LoadOptions,
)
from tokenswift.engine.arguments import shows
from tokenswift.loader.chat_template import has_template
from tokenswift.models.source import Source, open_model, wrap_model
from tokenswift.models.target import Target
from tokenswift.speculation.eagle.config import EagleWeights
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.resources import Resources
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError, OnProgress


class OpenedModel:
    """A model that is open until `close`; the arguments are those of ``LLM``, which describes
    them."""

    _name = ""
    _resources: Resources | None = None

    @shows(LoadOptions)
    def __init__(
        self,
        model: str | os.PathLike[str],
        dtype: Dtype | str | torch.dtype = "auto",
        device: Device | str | torch.device = "auto",
        heads: Literal["auto", "none"] | HeadKind | str | Path | Heads | None = "auto",
        eagle: str | Path | EagleWeights | None = "auto",
        on_progress: OnProgress | None = None,
        **loading: Unpack[LoadOptions],
    ) -> None:
        known = [field.name for field in fields(LoadConfig)]
        for option in loading:
            if option not in known:
                valid = ", ".join(("heads", "eagle", "on_progress", *known)) + meant(option, known)
                raise InputError(f"{option!r} is not an argument of LLM; valid: {valid}", option)
        if isinstance(dtype, torch.dtype):
            dtype = str(dtype).removeprefix("torch.")
        if isinstance(device, torch.device):
            device = str(device)
        how = LoadConfig(dtype, device, **loading)
        source = open_model(model, how, on_progress)
        self._name = str(model)
        arguments = LoadArguments(
            model=str(Path(model).expanduser().absolute()) if Path(model).exists() else self._name,
            dtype=how.dtype,
            device=how.device,
            heads=str(heads) if isinstance(heads, str | Path) else None,
            eagle=str(eagle) if isinstance(eagle, str | Path) else None,
            rope_scaling=how.rope_scaling,
            weights=how.weights,
            kv_cache_dtype=how.kv_cache_dtype,
            backend=how.backend,
        )
        self._resources = Resources(source, self._name, heads, how, on_progress, eagle, arguments)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Tokenizer | None = None,
        heads: Literal["auto", "none"] | HeadKind | str | Path | Heads | None = "auto",
        rope_scaling: str | None = None,
        backend: Backend | str = "auto",
        eagle: str | Path | EagleWeights | None = "auto",
    ) -> Self:
        """Wrap a loaded transformers model, whose layers may lie on several devices (its
        ``device_map``); the object itself stays as it is.

        On the CPU a supported family's weights are copied in packed form:
        ``llm.target.copied_bytes``.

        Args:
            model: a causal LM of transformers.
            tokenizer: its tokenizer; None: prompts are token ids, and texts are empty.
            heads: as for ``LLM``; shipped heads are found by the model's weights.
            rope_scaling: as for ``LLM``.
            backend: as for ``LLM``.
            eagle: as for ``LLM``.
        """
        how = LoadConfig(rope_scaling=rope_scaling, backend=backend)
        source = wrap_model(model, tokenizer, how)
        llm = cls.__new__(cls)
        llm._name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        llm._resources = Resources(source, llm._name, heads, how, eagle=eagle)
        return llm

    @property
    def name(self) -> str:
        """The model's name as it was given."""
        return self._name

    @property
    def resources(self) -> Resources:
        """The model ready to run, and what drafts for it.

        Raises:
            InputError: the ``LLM`` is closed.
        """
        if self._resources is None:
            raise InputError("the LLM is closed; valid: one that was not closed")
        return self._resources

    @property
    def loading(self) -> LoadArguments | None:
        """The arguments that load the model again; None: it came from a program."""
        return self.resources.loading

    @property
    def target(self) -> Target:
        """The model ready to run."""
        return self.resources.target

    @property
    def source(self) -> Source:
        """What the model was made from."""
        return self.resources.source

    @property
    def model(self) -> Any:
        """The transformers model, loaded at the first use of this where the weights came straight
        from its files, which then take twice the memory."""
        with self.resources.lock:
            return self.source.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None: there is none."""
        with self.resources.lock:
            return self.source.transformers_tokenizer

    def close(self) -> None:
        """Let go of packed weights and draft models; the ``LLM`` cannot be used any more. A model
        given to `from_model` is as it was before."""
        if self._resources is not None:
            self._resources.is_closed = True
        self._resources = None

    def __repr__(self) -> str:
        if self._resources is None:
            return f"LLM({self._name!r}, closed)"
        return f"LLM({self._name!r}, dtype={self.dtype!r}, device={self.device!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def dtype(self) -> str:
        """What is computed in, e.g. "float32"; "int8" where products and attention are."""
        return self.target.computes

    @property
    def device(self) -> str:
        """The model's device, e.g. "cpu"."""
        return str(self.target.device)

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can be chat messages."""
        return has_template(self.source.tokenizer)
