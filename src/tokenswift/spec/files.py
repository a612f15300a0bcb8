"""Tensors of checkpoints from anybody, in safetensors, bin or other files: held against a table of names and
shapes before any is read, then read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenswift.files import line_of
from tokenswift.kernels.weights import Stored
from tokenswift.loader.weights import open_weights, weight_files
from tokenswift.types import InputError

#: types of weights, as safetensors files and torch call them
FLOATS = ("F32", "BF16", "F16", "torch.float32", "torch.bfloat16", "torch.float16")
AT_ONCE = 4096  # rows that are looked at together


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
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file() and not any(folder.glob("*.safetensors")):
        yield from _pickled(pickled, where)
        return
    for file in weight_files(folder):
        yield from entries_of(file, where)


def entries_of(file: Path, where: str) -> Iterator[Entry]:
    """The tensors of a safetensors file."""
    opened = open_weights(file, f"{where}: file")
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        yield Entry(name, tuple(part.get_shape()), part.get_dtype(), partial(opened.get_tensor, name))


def _pickled(file: Path, where: str) -> Iterator[Entry]:
    """Plain tensors of a bin file, mapped; anything else in it is refused by torch, or left out."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling fails in many ways
        raise InputError(f"{where}: file {file.name} cannot be read as weights ({line_of(error)})") from error
    for name, tensor in content.items() if isinstance(content, dict) else ():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and isinstance(name, str)
        if plain and tensor.nbytes <= tensor.untyped_storage().nbytes():  # an expanded one can be of any size
            yield Entry(name, tuple(tensor.shape), str(tensor.dtype), tensor.clone)


def read_tensors(
    found: Mapping[str, Entry],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """Read tensors by our names: a `Tensor` each, or a `Stored` as a GGUF file holds it.

    Args:
        shapes: of all that there may be, of which ``optional`` may be missing.
    Raises:
        InputError: one is missing, or one too many, of another shape or type, or not finite.
    """
    for name in shapes:
        if name not in found and name not in optional:
            raise InputError(f"{where} lacks the tensor {name}; valid: {', '.join(shapes)}")
    for name, entry in found.items():
        if entry.shape != shapes.get(name) or entry.kind not in FLOATS:
            valid = f"{shapes[name]} in F32, BF16 or F16" if name in shapes else "a file without it"
            raise InputError(f"{where}: tensor {entry.name} is {entry.shape} in {entry.kind}; valid: {valid}")
    return {name: _finite(entry, where) for name, entry in found.items()}


def _finite(entry: Entry, where: str) -> Tensor | Stored:
    read: Any = entry.get()
    for start in range(0, len(read), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        part = Stored(read.format, read.blocks[rows]).decode() if isinstance(read, Stored) else read[rows]
        if not bool(torch.isfinite(torch.stack(part.aminmax())).all()):
            raise InputError(f"{where}: tensor {entry.name} holds values that are not finite")
    return read
