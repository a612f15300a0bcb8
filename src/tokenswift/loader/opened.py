"""The files of a model that the native decoder runs, opened without transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokenswift.config import LoadConfig
from tokenswift.kernels.formats import Stored
from tokenswift.loader.config import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    Layout,
    NativeConfig,
    check_small_files,
    completed,
    gguf_sampling,
    layout_of,
    named_sampling,
    read_config,
    read_generation,
    weight_names,
)
from tokenswift.loader.find import gguf_in, part_names
from tokenswift.loader.gguf import (
    GgufFile,
    GgufWeights,
    config_of,
    formats,
    is_native,
    own_dtype,
    say_foreign,
)
from tokenswift.loader.identity import config_digest, weights_digest
from tokenswift.loader.prompts import end_ids
from tokenswift.loader.rope import Rotary, rotary_of_config
from tokenswift.loader.tokenizer import PlainTokenizer, gguf_tokenizer, read
from tokenswift.loader.weights import FileWeights, headers
from tokenswift.types import InputError

#: types of safetensors files by their names there
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's files, read but for the weights themselves.

    Attributes:
        name: what the model was asked for by.
        folder: where the files are: a folder, or a GGUF file.
        config, layout, rotary: of the model.
        weights: by name.
        tokenizer: None where transformers' own has to be loaded.
        ends: ids that end a text, the tokenizer's own aside.
        sampling: settings that the model names.
        values: gives the weights by name that an identity samples.
        stored: types of a GGUF file's matrices; "" for a folder.
        stamps: size and time of each file.
    """

    name: str
    folder: Path
    config: NativeConfig
    layout: Layout
    rotary: Rotary
    weights: FileWeights | GgufWeights
    tokenizer: PlainTokenizer | None
    ends: frozenset[int]
    sampling: dict[str, Any]
    values: Callable[[], Iterable[tuple[str, Tensor | Stored]]]
    stored: str
    stamps: tuple[tuple[str, int, int], ...]

    def digests(self) -> dict[str, str]:
        """Digests "config" and "weights" of `identity`: read when they are asked for, as a journal begins.

        Raises:
            InputError: as of :meth:`check_unchanged`.
        """
        self.check_unchanged()
        weights = weights_digest(self.values(), self.weights.dtype)
        self.weights.rest()
        return {"config": config_digest(self.config), "weights": weights}

    def check_unchanged(self) -> None:
        """Refuse files that are not those that were opened.

        Raises:
            InputError: one has changed.
        """
        if _stamps(self.folder) != self.stamps:
            raise InputError(
                f"model folder {self.folder} has changed since the model was loaded; valid: to load it again"
            )


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    names = [] if folder.is_dir() else part_names(folder.name)
    paths = sorted(folder.iterdir()) if folder.is_dir() else [folder.with_name(name) for name in names]
    found = [(path.name, path.stat()) for path in paths if path.exists()]
    return tuple((name, about.st_size, about.st_mtime_ns) for name, about in found)


def open_files(
    name: str,
    folder: Path,
    how: LoadConfig,
    kind: str,
    keeps: Callable[[str, torch.dtype], bool],
) -> Opened | None:
    """The files of a model of a native family; None where transformers has to read them.

    Args:
        name: what the model was asked for by.
        folder: its folder, or a GGUF file.
        kind: of device: "cpu" or "cuda".
        keeps: whether weights of a format stay as they are stored beside a type of floats.
    Raises:
        InputError: the files say what no model's files say, or are not whole.
    """
    if (path := gguf_in(folder)) is not None:
        return _open_gguf(name, folder, GgufFile(path), how, kind, keeps)
    return _open_folder(name, folder, how) if folder.is_dir() else None


def _open_gguf(
    name: str,
    folder: Path,
    file: GgufFile,
    how: LoadConfig,
    kind: str,
    keeps: Callable[[str, torch.dtype], bool],
) -> Opened | None:
    if not is_native(file):
        return None
    stamps, config = _stamps(folder), config_of(file)
    dtype = how.floats or getattr(torch, own_dtype(file, kind))
    if how.weights == "stored":
        say_foreign(name, file, dtype, lambda form: keeps(form, dtype))
    layout = layout_of(config)
    weights = GgufWeights(file, layout, dtype)
    sampling = gguf_sampling(file.metadata)
    if not sampling and folder.is_dir():
        sampling = named_sampling(SimpleNamespace(**(read_generation(folder, name) or {})))
    return Opened(
        name=name,
        folder=folder,
        config=config,
        layout=layout,
        rotary=rotary_of_config(config, how.scaling, double=True),
        weights=weights,
        tokenizer=gguf_tokenizer(file.metadata, file.path),
        ends=frozenset(end_ids(config)),
        sampling=sampling,
        values=lambda: ((one, values) for one in weights.names() if (values := weights.get(one)) is not None),
        stored=formats(file),
        stamps=stamps,
    )


def _open_folder(name: str, folder: Path, how: LoadConfig) -> Opened | None:
    """A checkpoint in transformers' format whose files hold what transformers would make of them."""
    said, stamps = read_config(name, folder / "config.json"), _stamps(folder)
    config = completed(said["model_type"], said) if said.get("model_type") in FAMILIES else None
    if config is None:
        return None
    layout = layout_of(config)
    dtype = how.floats or _own_dtype(folder, config)
    if dtype is None or any(size % 2 for size in (layout.hidden_size, layout.intermediate_size)):
        return None
    check_small_files(name, folder)
    rotary = rotary_of_config(config, how.scaling)
    try:
        weights = FileWeights(folder, layout, dtype)
    except InputError:
        return None  # other files than safetensors, or other names: transformers may know them
    wanted = weight_names(config, layout)
    there = {one for one in weights.names() if not one.endswith("rotary_emb.inv_freq")}
    if layout.tied and HEAD in there and torch.equal(weights.raw(HEAD), weights.raw(EMBEDDING)):
        there.remove(HEAD)
    if there != wanted:
        return None
    weights.rest()
    generation = read_generation(folder, name)
    settings = SimpleNamespace(**(said if generation is None else generation))
    return Opened(
        name=name,
        folder=folder,
        config=config,
        layout=layout,
        rotary=rotary,
        weights=weights,
        tokenizer=read(folder, config.model_type),
        ends=frozenset(end_ids(settings, config)),
        sampling=named_sampling(settings),
        values=lambda: ((one, weights.raw(one)) for one in sorted(wanted)),
        stored="",
        stamps=stamps,
    )


def _own_dtype(folder: Path, config: NativeConfig) -> torch.dtype | None:
    """The type that a checkpoint says, or that all of its weights have; None: another, or several."""
    if config.dtype is None:
        try:
            kinds = {kind for _, kind in headers(folder).values()}
        except InputError:
            return None
        return STORED.get(kinds.pop()) if len(kinds) == 1 else None
    found = getattr(torch, str(config.dtype), None)
    return found if found in STORED.values() else None
