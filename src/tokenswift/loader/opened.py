"""A model's files, opened for the native decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tokenswift.config.loading import LoadConfig
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.config import completed, named_sampling, read_config
from tokenswift.loader.ends import end_ids
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.find import gguf_in
from tokenswift.loader.gguf import GgufFile, weights_of
from tokenswift.loader.gguf_config import config_of, own_dtype
from tokenswift.loader.gguf_tokenizer import gguf_tokenizer
from tokenswift.loader.layout import layout_of
from tokenswift.loader.parts import part_paths
from tokenswift.loader.plain_tokenizer import read
from tokenswift.loader.rope import Rotary, rotary_of_config
from tokenswift.loader.weights import Weights, weights_in
from tokenswift.types import InputError

#: types that a checkpoint's weights are computed with
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's files, read but for the weights themselves.

    Attributes:
        name: what the model was asked for by.
        folder: where the files are: a folder, or a GGUF file.
        config, rotary: of the model.
        weights: by name, with their layout.
        tokenizer: makes a `PlainTokenizer`, which takes a third of a second with a large
            vocabulary; or None, where transformers' own has to be loaded.
        ends: ids that end a text, the tokenizer's own aside.
        sampling: settings that the model names.
        stamps: size and time of each file.
    """

    name: str
    folder: Path
    config: SimpleNamespace
    rotary: Rotary
    weights: Weights
    tokenizer: Callable[[], Any]
    ends: frozenset[int]
    sampling: dict[str, Any]
    stamps: tuple[tuple[str, int, int], ...]

    def check_unchanged(self) -> None:
        """Refuse files that are not those that were opened.

        Raises:
            InputError: one has changed.
        """
        if _stamps(self.folder) != self.stamps:
            raise InputError(
                f"model folder {self.folder} has changed since the model was loaded; valid: to "
                f"load it again"
            )


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else part_paths(folder)
    found = [(path.name, path.stat()) for path in paths if path.exists()]
    return tuple((name, about.st_size, about.st_mtime_ns) for name, about in found)


def open_files(name: str, folder: Path, how: LoadConfig, place: str) -> Opened | None:
    """The files of a model of a native family; None where transformers has to read them.

    Args:
        name: what the model was asked for by.
        folder: its folder, or a GGUF file.
        place: from :func:`check_place`.
    Raises:
        InputError: the files say what no model's files say, or are not whole.
    """
    if gguf_in(folder) is not None:
        return open_gguf(name, folder, how, place)
    return _open_folder(name, folder, how) if folder.is_dir() else None


def open_gguf(name: str, folder: Path, how: LoadConfig, place: str) -> Opened:
    """A GGUF file, or the one of a folder."""
    stamps, file = _stamps(folder), GgufFile(gguf_in(folder) or folder)
    config, tokenizer = config_of(file), partial(gguf_tokenizer, file.metadata, file.path)
    dtype = how.floats or getattr(torch, own_dtype(file, place.partition(":")[0]))
    weights = weights_of(file, layout_of(config), dtype, how.weights)
    rotary = rotary_of_config(config, how.scaling, double=True)
    ends, sampling = frozenset(end_ids(config)), file.sampling()
    return Opened(name, folder, config, rotary, weights, tokenizer, ends, sampling, stamps)


def _open_folder(name: str, folder: Path, how: LoadConfig) -> Opened | None:
    """A checkpoint in transformers' format whose files hold what transformers would make of
    them."""
    said, stamps = read_config(name, folder / "config.json"), _stamps(folder)
    config = completed(said["model_type"], said) if said.get("model_type") in FAMILIES else None
    if config is None or not any(folder.glob("*.safetensors")):
        return None
    layout, dtype = layout_of(config), how.floats or getattr(torch, str(config.dtype), None)
    if dtype not in DTYPES or any(
        size % 2 for size in (layout.hidden_size, layout.intermediate_size)
    ):
        return None
    if (weights := weights_in(folder, layout, dtype, how.weights)) is None:
        return None
    rotary, generation = rotary_of_config(config, how.scaling), folder / "generation_config.json"
    given = object_in(generation, MOST_CONFIG, f"model {name}") if generation.exists() else said
    settings, tokenizer = SimpleNamespace(**given), partial(read, folder, config.model_type)
    ends, sampling = frozenset(end_ids(settings, config)), named_sampling(settings)
    return Opened(name, folder, config, rotary, weights, tokenizer, ends, sampling, stamps)
