"""What stands behind an ``LLM``: a loaded transformers model, or the files of one whose card is kept.

A model folder that was loaded before on this machine is read straight from its files (`models.card` says what
is known of it); transformers' own model and tokenizer are loaded when something asks for them. A GGUF file of
a family that the lean decoder runs is so from the first time on: what its card says is in the file, and its
check needs no transformers. Everything else (the first time, other families, devices, adapters, models from a
program) goes through transformers.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tokenswift.backends.weights import STORED_IN
from tokenswift.config import check_choice
from tokenswift.heads.checkpoint import HeadsHost, host_of
from tokenswift.heads.published import holds_heads
from tokenswift.identity import (
    base_of_weights,
    config_digest,
    digest_of,
    file_digest,
    identity_of,
    tokenizer_digest,
    weights_digest,
)
from tokenswift.models import card as cards
from tokenswift.models.card import Card
from tokenswift.models.checkpoint import HEAD, FileWeights, StoredWeights
from tokenswift.models.decoder import LeanTarget
from tokenswift.models.gguf import GgufWeights, config_of, formats, is_lean, layout_of, own_dtype
from tokenswift.models.gguf_tokenizer import build, end_ids, wrapped
from tokenswift.models.load import (
    WEIGHTS,
    cache_dir,
    check_memory,
    check_place,
    gguf_in,
    load_located,
    load_tokenizer,
    locate,
)
from tokenswift.models.recoded import Recoded
from tokenswift.models.rope import RopeScaling, rotary_of_config
from tokenswift.models.stand_in import StandIn, describe
from tokenswift.models.target import (
    TOLERANCES,
    Target,
    backend_for,
    backend_key,
    check_model,
    checked,
    make_target,
)
from tokenswift.models.unpacked import config_beside, say_differences, say_foreign
from tokenswift.prompts import end_tokens
from tokenswift.types import InputError, OnProgress
from tokenswift.weights.gguf import GgufFile
from tokenswift.weights.registry import FORMATS

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a model, and how it is to be loaded.

    Attributes:
        name: what the model was asked for by.
        folder: where its files are: a folder, or a GGUF file.
        dtype: the type asked for, "auto" included.
        scaling: a wish for YaRN.
        key: the name of its card.
        weights: what they are stored as, of `load.WEIGHTS`; it does not change the card.
        gguf: the GGUF file, where it is one.
    """

    name: str
    folder: Path
    dtype: str
    scaling: RopeScaling | None
    key: str | None
    weights: str = WEIGHTS[0]
    gguf: Path | None = None

    @classmethod
    def of(
        cls, name: str, folder: Path, dtype: str, scaling: RopeScaling | None, weights: str = WEIGHTS[0]
    ) -> Files:
        """The files in a folder, or a GGUF file."""
        return cls(name, folder, dtype, scaling, _key(folder, dtype, scaling), weights, gguf_in(folder))

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
        if self._kept is not None and self._kept.key is not None and isinstance(made, LeanTarget):
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
    """A model whose card is known, read from its files; the attributes and methods of :class:`FromModel`.

    Args:
        files: of the model.
        card: what is known of it; where nothing is known yet of how far its logits are (NaN), they are
            checked as the target is made, and the card is kept.
    Raises:
        InputError: the files are not what the card says.
    """

    def __init__(self, files: Files, card: Card, file: GgufFile | None = None) -> None:
        self._files, self._card = files, card
        dtype = getattr(torch, card.identity["dtype"])
        own: StoredWeights
        if files.gguf is None:
            own = FileWeights(files.folder, card.layout, dtype)
            source: Any = files.folder
        else:
            own = GgufWeights(file or GgufFile(files.gguf), card.layout, dtype)
            source = card.tokenizer and build(own.file.metadata, files.gguf)
        self._weights = own if files.weights == WEIGHTS[0] else Recoded(own, files.weights)
        self._stand_in: Any = None
        if card.tokenizer is not None:
            self._stand_in = StandIn(source, **card.tokenizer, real=lambda: self.tokenizer)
        base = base_of_weights(own.get, card.layout.num_hidden_layers, files.folder.name)
        self.host = HeadsHost(base, own.dtype, own.device, str(files.folder))

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
        if files.weights == WEIGHTS[0]:
            return load_located(files.name, str(files.folder), True, files.dtype, "cpu").model
        from tokenswift.models.unpacked import model_of

        made = model_of(_config(files), self._weights, self._weights.dtype, list(self._card.ends))
        made.name_or_path = files.name
        return made

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
        if not math.isnan(self._card.far):
            made.far = self._card.far
            return made
        made.far = checked(made, weights, self._files.name)
        self._card = replace(self._card, far=made.far)
        if self._files.key is not None and self._files.weights == WEIGHTS[0]:
            cards.write(cards_folder(), self._files.key, self._card)
        return made

    def identity(self) -> dict[str, Any]:
        """What of the model decides the tokens."""
        found, kind = dict(self._card.identity), self._files.weights
        if kind not in (WEIGHTS[0], "float32", found["dtype"]):
            found["weights"] = digest_of([found["weights"], kind], 32)
        if kind != WEIGHTS[0]:
            found["stored"] = f"{kind} of {found.get('stored', 'floats')}"
        return found

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
    card = None if files.key is None else cards.read(cards_folder(), files.key)
    if card is None:
        return None
    dtype = getattr(torch, card.identity["dtype"])
    if not card.far <= TOLERANCES[dtype]:
        return None
    try:
        found = FromFiles(files, card)
    except InputError:  # it was made for other files: what reads them anew says what is wrong with these
        return None
    _check_memory(files, card)
    return found


def _check_memory(files: Files, card: Card) -> None:
    """`check_memory` for weights as they will be stored."""
    dtype, kind = getattr(torch, card.identity["dtype"]), files.weights
    numbers = sum(math.prod(shape) for shape in card.layout.shapes().values())
    if kind in FORMATS:
        needed = FORMATS[kind].row_bytes(FORMATS[kind].block) * numbers // FORMATS[kind].block
    elif kind == WEIGHTS[0] and files.gguf is not None and dtype in STORED_IN:
        needed = files.gguf.stat().st_size
    else:
        needed = numbers * (dtype if kind == WEIGHTS[0] else getattr(torch, kind)).itemsize
    check_memory(files.name, needed, dtype == torch.float32 and kind == WEIGHTS[0] and files.gguf is None)


def _config(files: Files) -> Any:
    """The config of a lean family's model, as transformers has it."""
    from transformers import AutoConfig

    if files.gguf is None:
        return AutoConfig.from_pretrained(files.folder, local_files_only=True)
    found = config_beside(files.gguf)
    return config_of(GgufFile(files.gguf)) if found is None else found


def _from_gguf(files: Files) -> FromFiles | None:
    """A model from a GGUF file of which nothing is known yet; None: it must go through transformers.

    Raises:
        InputError: the file is not whole, or asks for what is not known here.
    """
    assert files.gguf is not None
    file = GgufFile(files.gguf)
    if not is_lean(file):
        return None
    config = _config(files)
    dtype = own_dtype(file) if files.dtype == "auto" else files.dtype
    kind = getattr(torch, dtype)
    say_foreign(files.name, file, kind)
    say_differences(files.name, files.gguf, config)
    layout, rotary = layout_of(file, config), rotary_of_config(config, files.scaling)
    weights = GgufWeights(file, layout, kind)
    own = build(file.metadata, files.gguf)
    tokenizer = wrapped(own, file.metadata)
    identity = {
        "dtype": dtype,
        "config": config_digest(config),
        "weights": weights_digest(((name, weights[name]) for name in weights.names()), kind),
        "adapter": None,
        "tokenizer": tokenizer_digest(tokenizer),
        "stored": f"{formats(file)} {file_digest(files.gguf)}",
    }
    card = Card(
        layout=layout,
        rope=(tuple(rotary.single().tolist()), rotary.scaling, rotary.limit),
        far=math.nan,
        identity=identity,
        ends=tuple(end_ids(file.metadata)),
        tokenizer=describe(tokenizer, own),
    )
    _check_memory(files, card)
    return FromFiles(files, card, file)


def open_model(
    name: str,
    dtype: str,
    device: str,
    scaling: RopeScaling | None,
    on_progress: OnProgress | None = None,
    weights: str = WEIGHTS[0],
) -> Source:
    """A model by its name; arguments and errors as of `models.load.load`.

    Args:
        scaling: a wish for YaRN.
        weights: what they are stored as, of `load.WEIGHTS`.
    """
    place = check_place(dtype, device)
    check_choice("weights", weights, WEIGHTS)
    where, local = locate(name, on_progress)
    files = None
    if place == "cpu" and Path(where).exists():
        files = Files.of(name, Path(where), dtype, scaling, weights)
        found = _from_files(files)
        if found is None and files.gguf is not None:
            found = _from_gguf(files)
        if found is not None:
            return _said(found, files)
    loaded = load_located(name, where, local, dtype, place, on_progress)
    made = FromModel(loaded.model, loaded.tokenizer, scaling, take=True, kept=files)
    if weights == WEIGHTS[0]:
        return made
    if files is not None:  # its card first: the check is of the model as it is
        made.target(on_progress)
        del made, loaded
        if (found := _from_files(files)) is not None:
            return _said(found, files)
    raise InputError(
        f"weights is {weights!r}, but model {name} runs through transformers' own model here; valid: stored"
    )


def _said(found: FromFiles, files: Files) -> FromFiles:
    """A source; one line where its weights are others than the files'."""
    if files.weights in FORMATS:
        logger.warning(
            "model %s is quantised to %s: another model, which writes other texts; all that is said of "
            "exactness holds for it",
            files.name,
            files.weights,
        )
    return found
