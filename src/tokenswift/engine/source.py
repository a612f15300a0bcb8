"""What stands behind an ``LLM``: a loaded transformers model, or the files of one whose card is kept.

A model folder that was loaded before on this machine is read straight from its files (`loader.card` says what
is known of it); transformers' own model and tokenizer are loaded when something asks for them. A GGUF file of
a family that the lean decoder runs is so from the first time on: what its card says is in the file, and its
check needs no transformers. Everything else (the first time, other families, devices, adapters, models from a
program) goes through transformers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tokenswift.config import check_choice
from tokenswift.kernels.base import Backend
from tokenswift.kernels.formats.format import Format
from tokenswift.kernels.formats.registry import BY_CODE, FORMATS
from tokenswift.loader import card as cards
from tokenswift.loader import placed
from tokenswift.loader.card import Card
from tokenswift.loader.checkpoint import HEAD, FileWeights, StoredWeights
from tokenswift.loader.gguf.file import GgufFile
from tokenswift.loader.gguf.model import GgufWeights, config_of, formats, is_lean, layout_of, own_dtype
from tokenswift.loader.gguf.tokenizer import build, end_ids, wrapped
from tokenswift.loader.identity import (
    base_of_weights,
    config_digest,
    digest_of,
    file_digest,
    identity_of,
    tokenizer_digest,
    weights_digest,
)
from tokenswift.loader.load import (
    DTYPES,
    WEIGHTS,
    cache_dir,
    check_backend,
    check_memory,
    check_place,
    check_spread,
    gguf_in,
    load_located,
    load_tokenizer,
    locate,
    no_room,
)
from tokenswift.loader.own_sampling import named, named_by_gguf, named_in
from tokenswift.loader.prompts import end_tokens
from tokenswift.loader.recoded import Recoded
from tokenswift.loader.rope import RopeScaling, rotary_of_config
from tokenswift.loader.stand_in import StandIn, describe
from tokenswift.loader.unpacked import config_beside, say_differences, say_foreign
from tokenswift.loader.vocabulary_checks import check_config_ids, check_tokenizer
from tokenswift.models.decoder import LeanTarget
from tokenswift.models.target import (
    TOLERANCES,
    Target,
    backend_for,
    check_model,
    checked,
    make_target,
)
from tokenswift.spec.heads.checkpoint import HeadsHost, host_of
from tokenswift.spec.heads.published import holds_heads
from tokenswift.types import InputError, OnProgress, RunError

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a model, and how it is to be loaded.

    Attributes:
        name: what the model was asked for by.
        folder: where its files are: a folder, or a GGUF file.
        dtype: the type asked for, "auto" included.
        scaling: a wish for YaRN.
        backend: what is to compute.
        key: the name of its card.
        weights: what they are stored as, of `load.WEIGHTS`; it does not change the card.
        gguf: the GGUF file, where it is one.
    """

    name: str
    folder: Path
    dtype: str
    scaling: RopeScaling | None
    backend: Backend
    key: str | None
    weights: str = WEIGHTS[0]
    gguf: Path | None = None

    @classmethod
    def of(
        cls,
        name: str,
        folder: Path,
        dtype: str,
        scaling: RopeScaling | None,
        backend: Backend,
        weights: str = WEIGHTS[0],
    ) -> Files:
        """The files in a folder, or a GGUF file."""
        key = _key(folder, dtype, scaling, backend)
        return cls(name, folder, dtype, scaling, backend, key, weights, gguf_in(folder))

    def on_host(self) -> Files:
        """The same for the CPU."""
        here = backend_for()
        return replace(self, backend=here, key=_key(self.folder, self.dtype, self.scaling, here))

    def are_as_they_were(self) -> bool:
        """Whether nothing in the folder has changed."""
        return _key(self.folder, self.dtype, self.scaling, self.backend) == self.key


def _key(folder: Path, dtype: str, scaling: RopeScaling | None, backend: Backend) -> str | None:
    try:
        return None if backend.key is None else cards.key_of(folder, dtype, scaling, backend.key)
    except OSError:
        return None


def cards_folder() -> Path:
    """Where cards are kept."""
    return cache_dir() / "cards"


def _check_ids(model: Any, tokenizer: Any) -> None:
    """Refuse ids of a tokenizer and of configs that the embedding has no rows for."""
    rows = model.get_input_embeddings().weight.shape[0]
    name = getattr(model, "name_or_path", "") or type(model).__name__
    if tokenizer is not None:
        check_tokenizer(tokenizer, rows, name)
    check_config_ids(model.config, rows, f"config.json of model {name}")
    check_config_ids(
        getattr(model, "generation_config", None), rows, f"generation_config.json of model {name}"
    )


class FromModel:
    """A loaded transformers model.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer, or None.
        scaling: a wish for YaRN.
        take: its weights may be taken (nobody else has it).
        kept: the files that it was loaded from, where a card of them may be kept.
        spread: it was loaded to lie in several places.
        backend: what computes, if the model is on its device; otherwise the usual one.

    Attributes:
        model, tokenizer: transformers' own.
        spread: whether its weights may lie in several places.
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
        backend: Backend | None = None,
        spread: bool = False,
    ) -> None:
        check_model(model)
        _check_ids(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.spread = spread or placed.is_placed(model)
        values = placed.parameters if self.spread else None
        self.host: HeadsHost = host_of(model, values)
        self._scaling, self._take, self._kept, self._backend = scaling, take, kept, backend
        self._identity = identity_of(model, values)

    @property
    def codec(self) -> Any:
        """The tokenizer."""
        return self.tokenizer

    def target(self, on_progress: OnProgress | None = None) -> Target:
        """The target, made now and checked; what the next load needs to know is kept."""
        names = {name for name, _ in self.model.named_parameters()}
        try:
            made = make_target(self.model, self._scaling, self._take, on_progress, self._backend, self.spread)
        except torch.OutOfMemoryError as error:
            needed = sum(part.numel() * part.element_size() for part in self.model.parameters())
            raise _no_room(self.model.name_or_path, self._backend, needed, []) from error
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

    def named_sampling(self) -> dict[str, Any]:
        """The sampling settings that the model itself names."""
        return named(getattr(self.model, "generation_config", None))

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
            self._named = named_in(files.folder)
        else:
            own = GgufWeights(file or GgufFile(files.gguf), card.layout, dtype)
            source = card.tokenizer and build(own.file.metadata, files.gguf)
            self._named = named_by_gguf(own.file.metadata)
            if not self._named and files.folder.is_dir():
                self._named = named_in(files.folder, ("generation_config.json",))
        self._weights = own if files.weights == WEIGHTS[0] else Recoded(own, files.weights)
        self._stand_in: Any = None
        if card.tokenizer is not None:
            self._stand_in = StandIn(source, **card.tokenizer)
        base = base_of_weights(own.get, card.layout.num_hidden_layers, files.folder.name)
        self.host = HeadsHost(base, own.dtype, files.backend.device, str(files.folder))

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
        files, place = self._files, str(self._files.backend.device)
        if files.weights == WEIGHTS[0]:
            return load_located(files.name, str(files.folder), True, files.dtype, place).model
        from tokenswift.loader.unpacked import model_of

        made = model_of(_config(files), self._weights, self._weights.dtype, list(self._card.ends))
        made.name_or_path = files.name
        return made.to(place)

    def _check_files(self) -> None:
        if not self._files.are_as_they_were():
            raise InputError(
                f"model folder {self._files.folder} has changed since the model was loaded; "
                "valid: to load it again"
            )

    def target(self, on_progress: OnProgress | None = None) -> Target:
        """The target, its weights packed from the files."""
        weights, backend = self._weights, self._files.backend
        if on_progress is not None:
            for done in (0, len(weights.names())):  # nothing is read before it is packed
                on_progress("load", done, len(weights.names()))
        rotary = self._card.rotary.to(backend.device)
        try:
            made = LeanTarget(weights, backend, rotary, on_progress=on_progress)
        except torch.OutOfMemoryError as error:
            raise _no_room(self._files.name, backend, *self._sizes()) from error
        if not math.isnan(self._card.far):
            made.far = self._card.far
            return made
        made.far = checked(made, weights, self._files.name)
        self._card = replace(self._card, far=made.far)
        if self._files.key is not None and self._files.weights == WEIGHTS[0]:
            cards.write(cards_folder(), self._files.key, self._card)
        return made

    def check_memory(self) -> None:
        """See that the weights fit, as they will be stored.

        Raises:
            InputError: they do not.
        """
        files = self._files
        needed, others = self._sizes()
        check_memory(files.name, needed, str(files.backend.device), others)

    def _sizes(self) -> tuple[int, list[tuple[str, int]]]:
        """Bytes of the weights as they will be stored, and of ways to store them in less."""
        backend, layout, kind = self._files.backend, self._card.layout, self._files.weights
        dtype = getattr(torch, self._card.identity["dtype"])
        shapes = layout.shapes().values()
        numbers = sum(math.prod(shape) for shape in shapes)

        def stored(form: Format) -> int:
            return numbers // form.block * form.nbytes

        if isinstance(self._weights, GgufWeights):
            needed = sum(
                entry.nbytes
                if entry.code in BY_CODE and backend.keeps(BY_CODE[entry.code].name, dtype)
                else math.prod(entry.shape) * dtype.itemsize
                for entry in self._weights.file.tensors.values()
            )
        elif kind in FORMATS and backend.keeps(kind, dtype):
            needed = stored(FORMATS[kind])
        else:
            needed = numbers * (getattr(torch, kind) if kind in DTYPES else dtype).itemsize
        fits = all(shape[-1] % 32 == 0 for shape in shapes if len(shape) > 1)
        forms = [FORMATS[k] for k in WEIGHTS if k in FORMATS and fits and backend.keeps(k, dtype)]
        ways = [(f"weights {form.name}", stored(form)) for form in forms]
        if dtype == torch.float32 and kind == WEIGHTS[0] and self._files.gguf is None:
            ways.insert(0, ("dtype bfloat16", needed // 2))
        return needed, ways

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

    def named_sampling(self) -> dict[str, Any]:
        """The sampling settings that the model itself names."""
        if "model" in self.__dict__:  # as above
            return named(getattr(self.model, "generation_config", None))
        return dict(self._named)


Source = FromModel | FromFiles


def _kept_card(files: Files) -> Card | None:
    card = None if files.key is None else cards.read(cards_folder(), files.key)
    if card is None or not card.far <= TOLERANCES[getattr(torch, card.identity["dtype"])]:
        return None
    return card


def _from_files(files: Files) -> FromFiles | None:
    """A model whose card is kept; None: there is no card, or none that fits the files.

    Raises:
        InputError: the weights do not fit into memory.
    """
    card = _kept_card(files)
    if card is None and files.weights != WEIGHTS[0] and not files.backend.on_host:
        card = _kept_card(files.on_host())  # what is stored otherwise is checked as it is made
        card = None if card is None else replace(card, far=math.nan)
    if card is None:
        return None
    try:
        found = FromFiles(files, card)
    except InputError:  # it was made for other files: what reads them anew says what is wrong with these
        return None
    found.check_memory()
    return found


def _no_room(name: str, backend: Backend | None, needed: int, others: list[tuple[str, int]]) -> RunError:
    """What is said where memory runs out while a model is loaded."""
    memory = None if backend is None else backend.memory()
    return RunError(
        no_room(name, needed, 0 if memory is None else memory.free, others) + "; nothing was kept"
    )


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
    dtype = own_dtype(file, files.backend.kind) if files.dtype == "auto" else files.dtype
    kind = getattr(torch, dtype)
    if files.weights == WEIGHTS[0]:
        say_foreign(files.name, file, kind, lambda form: files.backend.keeps(form, kind))
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
    found = FromFiles(files, card, file)
    found.check_memory()
    return found


def open_model(
    name: str,
    dtype: str,
    device: str,
    scaling: RopeScaling | None,
    on_progress: OnProgress | None = None,
    weights: str = WEIGHTS[0],
    backend: str = "auto",
    graphs: bool = True,
    device_map: str | Mapping[str, str | int] | None = None,
    tp: int = 1,
) -> Source:
    """A model by its name; arguments and errors as of `loader.load.load`.

    Args:
        scaling: a wish for YaRN.
        weights: what they are stored as, of `load.WEIGHTS`.
        backend, graphs: as of `target.backend_for`.
    """
    place = check_place(dtype, device)
    check_choice("weights", weights, WEIGHTS)
    check_backend(backend, place)
    check_spread(device_map, tp, device)
    spread = device_map is not None or tp > 1
    if spread:
        for option, value, usual in (("weights", weights, WEIGHTS[0]), ("backend", backend, "auto")):
            if value != usual:
                raise InputError(f"{option} is {value!r}, but {_spread(device_map, tp)}; valid: {usual}")
    where, local = locate(name, on_progress)
    if spread:
        loaded = load_located(name, where, local, dtype, place, on_progress, device_map, tp)
        logger.info("%s: transformers' own forward is used", _spread(device_map, tp))
        return FromModel(loaded.model, loaded.tokenizer, scaling, take=True, spread=True)
    files, computes = None, backend_for(place, backend, graphs)
    if computes.decodes and Path(where).exists():
        files = Files.of(name, Path(where), dtype, scaling, computes, weights)
        found = _from_files(files)
        if found is None and files.gguf is not None:
            found = _from_gguf(files)
        if found is not None:
            return _said(found, files)
    if weights == WEIGHTS[0]:
        loaded = load_located(name, where, local, dtype, place, on_progress)
        return FromModel(loaded.model, loaded.tokenizer, scaling, take=True, kept=files, backend=computes)
    if files is not None:  # its card first, on the host: the check is of the model as it is
        kept = files if computes.on_host else files.on_host()
        loaded = load_located(name, where, local, dtype, "cpu", on_progress)
        made = FromModel(loaded.model, loaded.tokenizer, scaling, take=True, kept=kept, backend=kept.backend)
        made.target(on_progress)
        del made, loaded
        if (found := _from_files(files)) is not None:
            return _said(found, files)
    raise InputError(
        f"weights is {weights!r}, but model {name} runs through transformers' own model here; valid: stored"
    )


def _spread(device_map: object, tp: int) -> str:
    """How a model is spread, in words."""
    return f"the model is spread over {tp} ranks" if tp > 1 else "the model's layers are placed by device_map"


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
