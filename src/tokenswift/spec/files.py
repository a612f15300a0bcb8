"""Tensors of checkpoints from anybody: one or several files, safetensors or bin, looked at before they are
read, and read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.files import line_of, weight_map
from tokenswift.loader.weights import open_weights
from tokenswift.types import InputError

#: types of numbers, and their names in safetensors files
KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}
STEMS = ("model.safetensors", "pytorch_model.bin")


class Entry(NamedTuple):
    """A tensor of a file: its name there, its shape, the type of its numbers, and what reads it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    get: Callable[[], Any]


def tensors_in(folder: Path, where: str) -> Iterator[Entry]:
    """The tensors of a folder.

    Args:
        where: whose they are, for messages.
    Raises:
        InputError: there are no weights, or a file is missing, unreadable or more than plain weights.
    """
    for file in _shards(folder, where):
        yield from (entries_of if file.suffix == ".safetensors" else _pickled)(file, where)


def _shards(folder: Path, where: str) -> list[Path]:
    """The files of a folder that weights are in; raises as :func:`tensors_in`."""
    for stem in STEMS:
        if (folder / stem).is_file():
            return [folder / stem]
        if (index := folder / f"{stem}.index.json").is_file():
            names = sorted({*weight_map(index, where, ("safetensors", "bin")).values()})
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise InputError(f"{where} lacks {missing[0]}, which its index names; valid: all its files")
            return [folder / name for name in names]
    raise InputError(f"{where} has no safetensors or bin weights")


def entries_of(file: Path, where: str) -> Iterator[Entry]:
    """The tensors of a safetensors file."""
    opened = open_weights(file, f"{where}: file")
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        yield Entry(name, tuple(part.get_shape()), part.get_dtype(), partial(opened.get_tensor, name))


def _pickled(file: Path, where: str) -> Iterator[Entry]:
    """Plain tensors of a bin file, mapped; anything else in it is refused by torch."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling fails in many ways
        raise InputError(f"{where}: file {file.name} cannot be read as weights ({line_of(error)})") from error
    for name, tensor in content.items() if isinstance(content, dict) else ():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not isinstance(name, str):
            raise InputError(
                f"{where}: file {file.name} holds {shown(name)}, which is no plain tensor; valid: tensors by "
                "name"
            )
        yield Entry(name, tuple(tensor.shape), KINDS.get(tensor.dtype, str(tensor.dtype)), tensor.clone)
