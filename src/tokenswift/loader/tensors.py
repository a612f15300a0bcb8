"""Tensors of files: what a header says of each, held against a table before any is read."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenswift.kernels.formats import Stored
from tokenswift.types import InputError

#: types of numbers that weights are made of, as safetensors files call them
FLOATS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
#: types that are read as tensors: integers are maps of vocabularies, or bytes of quantized blocks
DENSE = {**FLOATS, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
#: more tensors than any model's files have
MOST_TENSORS = 1 << 16


class Entry(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: its name in the file.
        shape: its shape.
        kind: the type of its numbers: a key of `DENSE`, or the name of a quantized format.
        get: reads it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    get: Callable[[], Tensor | Stored]


def check_tensors(
    entries: Mapping[str, Entry],
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Collection[str],
    where: str,
    optional: Collection[str] = (),
) -> None:
    """Hold all that may be read of a file against a table, before anything is read.

    Args:
        entries: the tensors of the file by our names.
        shapes: of all that there may be, of which ``optional`` may be missing.
        kinds: types that weights may have.
        where: the file, for messages.
    Raises:
        InputError: one is missing, of another shape or type, or one too many.
    """
    for name in shapes:
        if name not in entries and name not in optional:
            raise InputError(f"{where} lacks the tensor {name}; valid: files where none is missing")
    for name, entry in entries.items():
        shape = shapes.get(name)
        if entry.shape == shape and entry.kind in kinds:
            continue
        types = entry.kind if entry.kind in kinds else ", ".join(sorted(kinds))
        valid = "a file without it" if shape is None else f"{shape} in {types}"
        raise InputError(
            f"{where}: tensor {entry.name} is {entry.shape} in {entry.kind}; valid: {valid}"
        )


def dense(entry: Entry) -> Tensor:
    """A tensor of a file, read; a matrix in a quantized format is unpacked in float32."""
    values = entry.get()
    return values.decode() if isinstance(values, Stored) else values


def mapped(path: Path, start: int, nbytes: int) -> Tensor:
    """Bytes of a file, uint8: a private mapping, which leaves the process with the tensor."""
    before = start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        part = mmap.mmap(
            file.fileno(), before + nbytes, access=mmap.ACCESS_COPY, offset=start - before
        )
    return torch.frombuffer(part, dtype=torch.uint8, offset=before, count=nbytes)
