"""Tensors of checkpoints from anybody, in safetensors, bin or other files: held against a table of
names and shapes before any is read, then read one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tokenswift.files import line_of
from tokenswift.kernels.formats import Stored
from tokenswift.loader.safetensors_file import SafetensorsFile, weight_files
from tokenswift.loader.tensors import Entry, check_tensors
from tokenswift.types import InputError

#: types of weights, as safetensors files and torch call them
FLOATS = ("F32", "BF16", "F16", "torch.float32", "torch.bfloat16", "torch.float16")
AT_ONCE = 4096  # rows that are looked at together


def tensors_in(folder: Path, where: str) -> Iterator[Entry]:
    """The tensors of a folder.

    Args:
        where: whose they are, for messages.
    Raises:
        InputError: there are no weights, or a file is missing, unreadable or more than plain
            weights.
    """
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file() and not any(folder.glob("*.safetensors")):
        yield from _pickled(pickled, where)
        return
    for file in weight_files(folder):
        yield from SafetensorsFile(file, f"{where}: file").entries.values()


def _pickled(file: Path, where: str) -> Iterator[Entry]:
    """Plain tensors of a bin file, mapped; anything else in it is refused by torch, or left out."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling fails in many ways
        raise InputError(
            f"{where}: file {file.name} cannot be read as weights ({line_of(error)})"
        ) from error
    for name, tensor in content.items() if isinstance(content, dict) else ():
        plain = (
            isinstance(tensor, Tensor) and tensor.layout == torch.strided and isinstance(name, str)
        )
        if (
            plain and tensor.nbytes <= tensor.untyped_storage().nbytes()
        ):  # an expanded one can be of any size
            yield Entry(name, tuple(tensor.shape), str(tensor.dtype), tensor.clone)


def read_tensors(
    entries: Mapping[str, Entry],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    optional: Collection[str] = (),
) -> dict[str, Tensor | Stored]:
    """Read tensors by our names: a `Tensor` each, or a `Stored` as a GGUF file holds it.

    Args:
        shapes: of all that there may be, of which ``optional`` may be missing.
    Raises:
        InputError: one is missing, or one too many, of another shape or type, or not finite.
    """
    check_tensors(entries, shapes, FLOATS, where, optional)
    return {name: _finite(entry, where) for name, entry in entries.items()}


def _finite(entry: Entry, where: str) -> Tensor | Stored:
    values: Tensor | Stored = entry.get()
    for start in range(0, len(values), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        part = (
            Stored(values.format, values.blocks[rows]).decode()
            if isinstance(values, Stored)
            else values[rows]
        )
        if not bool(torch.isfinite(torch.stack(part.aminmax())).all()):
            raise InputError(f"{where}: tensor {entry.name} holds values that are not finite")
    return values
