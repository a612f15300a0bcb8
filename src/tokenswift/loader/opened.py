"""A model's files, opened for the native decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from tokenswift.config.loading import LoadConfig
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.config import ModelConfig, completed
from tokenswift.loader.config_file import read_config
from tokenswift.loader.ends import end_ids
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.find import gguf_in
from tokenswift.loader.gguf import GgufFile, weights_of
from tokenswift.loader.gguf_config import auto_dtype, config_of
from tokenswift.loader.gguf_tokenizer import gguf_tokenizer
from tokenswift.loader.layout import EMBEDDING, layout_of
from tokenswift.loader.multimodal import has_head, wraps_text
from tokenswift.loader.named_sampling import named_sampling
from tokenswift.loader.parts import part_paths
from tokenswift.loader.plain_tokenizer import PlainTokenizer, read
from tokenswift.loader.rope import rotary_of_config
from tokenswift.loader.rotary import Rotary
from tokenswift.loader.safetensors_file import SafetensorsFile, weight_files
from tokenswift.loader.tensors import FLOATS
from tokenswift.loader.weights import Weights, stored_names, weights_in
from tokenswift.types import InputError

#: types that a checkpoint's weights are computed with
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's files, read but for the weights themselves.

    Attributes:
        name: the name by which the model was asked for.
        folder: where the files are: a folder, or a GGUF file.
        config, rotary: of the model.
        weights: by name, with their layout.
        tokenizer: makes a `PlainTokenizer`, which takes a third of a second with a large
            vocabulary; or None, where transformers' own has to be loaded.
        ends: ids that end a text, but for those that the tokenizer names.
        sampling: settings that the model names.
        stamps: size and time of each file.
    """

    name: str
    folder: Path
    config: ModelConfig
    rotary: Rotary
    weights: Weights
    tokenizer: Callable[[], PlainTokenizer | None]
    ends: frozenset[int]
    sampling: Mapping[str, object]
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
    """Size and time of each file that is there."""
    stamps: list[tuple[str, int, int]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else part_paths(folder):
        if path.exists():
            status = path.stat()
            stamps.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def open_files(name: str, folder: Path, how: LoadConfig, place: str) -> Opened | None:
    """The files of a model of a native family; None where transformers has to read them.

    Args:
        name: the name by which the model was asked for.
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
    stamps = _stamps(folder)
    file = GgufFile(gguf_in(folder) or folder)
    config = config_of(file)
    device = place.partition(":")[0]
    dtype = how.floats or getattr(torch, auto_dtype(file, device))
    weights = weights_of(file, layout_of(config), dtype, how.weights)
    return Opened(
        name=name,
        folder=folder,
        config=config,
        rotary=rotary_of_config(config, how.scaling, double=True),
        weights=weights,
        tokenizer=partial(gguf_tokenizer, file.metadata, file.path),
        ends=frozenset(end_ids(config)),
        sampling=file.sampling(),
        stamps=stamps,
    )


def _stored_type(folder: Path) -> str:
    """The type of a checkpoint's embedding, where its config names none; "" where there is none."""
    for path in weight_files(folder):
        entry = SafetensorsFile(path).entries.get(EMBEDDING)
        if entry is not None:
            return str(FLOATS.get(entry.kind, "")).removeprefix("torch.")
    return ""


def _open_folder(name: str, folder: Path, how: LoadConfig) -> Opened | None:
    """A checkpoint in transformers' format whose files hold what transformers would make of
    them."""
    stated = read_config(name, folder / "config.json")
    stamps = _stamps(folder)
    kind = stated.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        return None
    config = completed(kind, stated)
    if config is None or not any(folder.glob("*.safetensors")):
        return None
    if wraps_text(name, folder):
        config.tie_word_embeddings = not has_head(stored_names(folder))
    layout = layout_of(config)
    dtype = how.floats or getattr(torch, str(config.dtype or _stored_type(folder)), None)
    if dtype not in DTYPES or any(size % 2 for size in layout.product_sizes()):
        return None
    weights = weights_in(folder, layout, dtype, how.weights)
    if weights is None:
        return None
    generation = folder / "generation_config.json"
    if generation.exists():
        stated = object_in(generation, MOST_CONFIG, f"model {name}")
    settings = SimpleNamespace(**stated)
    return Opened(
        name=name,
        folder=folder,
        config=config,
        rotary=rotary_of_config(config, how.scaling),
        weights=weights,
        tokenizer=partial(read, folder, config.model_type),
        ends=frozenset(end_ids(settings, config)),
        sampling=named_sampling(settings),
        stamps=stamps,
    )
