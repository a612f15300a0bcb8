"""What stands behind an ``LLM``: a loaded transformers model, or the files of one whose card is kept.

A model folder that was loaded before on this machine is read straight from its files (`models.card` says what
is known of it); transformers' own model and tokenizer are loaded when something asks for them. Everything
else (the first time, other families, devices, adapters, models from a program) goes through transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tokenswift.heads.checkpoint import HeadsHost, host_of
from tokenswift.heads.published import holds_heads
from tokenswift.identity import base_of_weights, identity_of, tokenizer_digest, weights_digest
from tokenswift.models import card as cards
from tokenswift.models.card import Card
from tokenswift.models.checkpoint import HEAD, FileWeights
from tokenswift.models.decoder import LeanTarget
from tokenswift.models.load import (
    cache_dir,
    check_memory,
    check_place,
    load_located,
    load_tokenizer,
    locate,
)
from tokenswift.models.rope import RopeScaling
from tokenswift.models.stand_in import StandIn, describe
from tokenswift.models.target import TOLERANCES, Target, backend_for, backend_key, check_model, make_target
from tokenswift.prompts import end_tokens
from tokenswift.types import InputError, OnProgress


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a model, and how it is to be loaded.

    Attributes:
        name: what the model was asked for by.
        folder: where its files are.
        dtype: the type asked for, "auto" included.
        scaling: a wish for YaRN.
        key: the name of its card.
    """

    name: str
    folder: Path
    dtype: str
    scaling: RopeScaling | None
    key: str

    @classmethod
    def of(cls, name: str, folder: Path, dtype: str, scaling: RopeScaling | None) -> Files | None:
        """The files in a folder; None where no card can be kept of them."""
        key = _key(folder, dtype, scaling)
        return None if key is None else cls(name, folder, dtype, scaling, key)

    def are_as_they_were(self) -> bool:
        """Whether nothing in the folder has changed."""
        return _key(self.folder, self.dtype, self.scaling) == self.key


def _key(folder: Path, dtype: str, scaling: RopeScaling | None) -> str | None:
    made = backend_key()
    try:
        return None if made is None else cards.key_of(folder, dtype, scaling, made)
    except OSError:
        return None


def cards_folder() -> Path:
    """Where cards are kept."""
    return cache_dir() / "cards"


class FromModel:
    """A loaded transformers model.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer, or None.
        scaling: a wish for YaRN.
        take: its weights may be taken (nobody else has it).
        kept: the files that it was loaded from, where a card of them may be kept.

    Attributes:
        model, tokenizer: transformers' own.
        codec: what makes ids of texts and texts of ids.
        host: what heads must fit.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        scaling: RopeScaling | None,
        take: bool,
        kept: Files | None = None,
    ) -> None:
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        self.host: HeadsHost = host_of(model)
        self._scaling, self._take, self._kept = scaling, take, kept
        self._identity = identity_of(model)

    @property
    def codec(self) -> Any:
        """The tokenizer."""
        return self.tokenizer

    def target(self, on_progress: OnProgress | None = None) -> Target:
        """The target, made now and checked; what the next load needs to know is kept."""
        names = {name for name, _ in self.model.named_parameters()}
        made = make_target(self.model, self._scaling, self._take, on_progress)
        if self._kept is not None and isinstance(made, LeanTarget):
            found = self._card(made, names, self._kept)
            if found is not None:
                cards.write(cards_folder(), self._kept.key, found)
        return made

    def identity(self) -> dict[str, Any]:
        """What of the model decides the tokens."""
        if "tokenizer" not in self._identity:
            self._identity["tokenizer"] = tokenizer_digest(self.tokenizer)
        return dict(self._identity)

    def end_tokens(self) -> set[int]:
        """End-of-text ids."""
        return end_tokens(self.model, self.tokenizer)

    def _card(self, made: LeanTarget, names: set[str], kept: Files) -> Card | None:
        """The card of a model whose files hold what transformers made of them, name for name."""
        layout, rotary, identity = made.layout, made.rotary, self.identity()
        usual = type(self.model).__module__.startswith("transformers.models.")
        if (
            not usual
            or identity["adapter"] is not None
            or rotary.frequencies is None
            or holds_heads(kept.folder)
        ):
            return None
        try:
            weights = FileWeights(kept.folder, layout, made.dtype)
        except InputError:
            return None  # other files than safetensors, or other names
        there = {name for name in weights.names() if not name.endswith("rotary_emb.inv_freq")}
        if there - ({HEAD} if layout.tied else set()) != names:
            return None
        digest = weights_digest((name, weights[name]) for name in sorted(names))
        weights.rest()
        if digest != identity["weights"] or not kept.are_as_they_were():
            return None
        return Card(
            layout=layout,
            rope=(tuple(rotary.frequencies.tolist()), rotary.scaling, rotary.limit),
            far=made.far,
            identity=identity,
            ends=tuple(sorted(self.end_tokens())),
            tokenizer=describe(self.tokenizer, kept.folder),
        )


class FromFiles:
    """A model whose card is kept, read from its files; the attributes and methods of :class:`FromModel`.

    Args:
        files: of the model.
        card: what is known of it.
    Raises:
        InputError: the files are not what the card says.
    """

    def __init__(self, files: Files, card: Card) -> None:
        self._files, self._card = files, card
        self._weights = FileWeights(files.folder, card.layout, getattr(torch, card.identity["dtype"]))
        self._stand_in: Any = None
        if card.tokenizer is not None:
            self._stand_in = StandIn(files.folder, **card.tokenizer, real=lambda: self.tokenizer)
        base = base_of_weights(self._weights.get, card.layout.num_hidden_layers, files.folder.name)
        self.host = HeadsHost(base, self._weights.dtype, self._weights.device, str(files.folder))

    @property
    def codec(self) -> Any:
        """The tokenizer, or what stands in for it."""
        return self.tokenizer if self._stand_in is None else self._stand_in

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' own tokenizer, loaded now.

        Raises:
            InputError: the files have changed.
        """
        self._check_files()
        return load_tokenizer(self._files.name, str(self._files.folder), local=True)

    @cached_property
    def model(self) -> Any:
        """transformers' own model, loaded now: from then on the weights take twice the memory.

        Raises:
            InputError: the files have changed.
        """
        self._check_files()
        files = self._files
        return load_located(files.name, str(files.folder), True, files.dtype, "cpu").model

    def _check_files(self) -> None:
        if not self._files.are_as_they_were():
            raise InputError(
                f"model folder {self._files.folder} has changed since the model was loaded; "
                "valid: to load it again"
            )

    def target(self, on_progress: OnProgress | None = None) -> Target:
        """The target, its weights packed from the files."""
        weights = self._weights
        if on_progress is not None:
            for done in (0, len(weights.names())):  # nothing is read before it is packed
                on_progress("load", done, len(weights.names()))
        made = LeanTarget(weights, backend_for(), self._card.rotary, on_progress=on_progress)
        made.far = self._card.far
        return made

    def identity(self) -> dict[str, Any]:
        """What of the model decides the tokens."""
        return dict(self._card.identity)

    def end_tokens(self) -> set[int]:
        """End-of-text ids."""
        if "model" in self.__dict__:  # somebody has it, and may have set others
            return end_tokens(self.model, self.tokenizer)
        return set(self._card.ends)


Source = FromModel | FromFiles


def _from_files(files: Files) -> FromFiles | None:
    """A model whose card is kept; None: there is no card, or none that fits the files.

    Raises:
        InputError: the weights do not fit into memory.
    """
    card = cards.read(cards_folder(), files.key)
    if card is None:
        return None
    dtype = getattr(torch, card.identity["dtype"])
    if not card.far <= TOLERANCES[dtype]:
        return None
    try:
        found = FromFiles(files, card)
    except InputError:  # it was made for other files: transformers says what is wrong with these
        return None
    numbers = sum(math.prod(shape) for shape in card.layout.shapes().values())
    check_memory(files.name, numbers * dtype.itemsize, dtype == torch.float32)
    return found


def open_model(
    name: str, dtype: str, device: str, scaling: RopeScaling | None, on_progress: OnProgress | None = None
) -> Source:
    """A model by its name; arguments and errors as of `models.load.load`.

    Args:
        scaling: a wish for YaRN.
    """
    place = check_place(dtype, device)
    where, local = locate(name, on_progress)
    files = None
    if place == "cpu" and Path(where).is_dir():
        files = Files.of(name, Path(where), dtype, scaling)
    if files is not None and (found := _from_files(files)) is not None:
        return found
    loaded = load_located(name, where, local, dtype, place, on_progress)
    return FromModel(loaded.model, loaded.tokenizer, scaling, take=True, kept=files)
