"""Weights by the names of transformers' checkpoints, from a model's files or a loaded model.

Names, shapes and types of a file's tensors are held against the table of a `Layout` before
anything is read (:func:`check_tensors`). Each read maps its part of a file anew, so that it leaves
the process with the tensor.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from tokenswift.files import weight_map
from tokenswift.kernels.formats import FORMATS, Stored
from tokenswift.loader.errors import refused_as
from tokenswift.loader.layout import EMBEDDING, HEAD, Layout
from tokenswift.types import InputError

INDEX = "model.safetensors.index.json"
#: types of numbers in safetensors files that weights are made of
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
FLOATS |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
#: all that are read: integers are maps of vocabularies, or bytes of quantized blocks
DENSE = FLOATS | {"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
#: more than any model's file has: bytes of a header, tensors
MOST_HEADER, MOST_TENSORS = 1 << 24, 1 << 16


class Entry(NamedTuple):
    """A tensor of a file: its name there, its shape, the type of its numbers, and what reads it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    get: Callable[[], Any]


class Weights:
    """Weights of a model's files.

    Args:
        layout: which weights there must be.
        dtype: the type that those are given in which are not stored in a quantized format.
        entries: tensors of the files by their names in transformers.
        kind: what matrices are stored as in memory, one of `config.loading.Weights`.

    Attributes:
        copies: whether what is packed stands beside the weights themselves.
    """

    copies = False

    def __init__(
        self, layout: Layout, dtype: torch.dtype, entries: Mapping[str, Entry], kind: str = "stored"
    ) -> None:
        self.layout, self.dtype, self.entries, self.kind = layout, dtype, entries, kind

    def raw(self, name: str) -> Tensor | Stored | None:
        """A tensor, or a weight in a quantized format, as the files have it; None: there is
        none."""
        entry = self.entries.get(EMBEDDING if name == HEAD and self.layout.tied else name)
        return None if entry is None else entry.get()

    def get(self, name: str) -> Tensor | Stored | None:
        """A weight in the type that is asked for, matrices stored as is asked for.

        Raises:
            InputError: a matrix has no whole blocks of a format.
        """
        found: Any = self.raw(name)
        if isinstance(found, Tensor):
            found = found.to(self.dtype)
        if self.kind == "stored" or found is None or len(found.shape) != 2:
            return found
        if (format := FORMATS.get(self.kind)) is None:
            return unstored(found, getattr(torch, self.kind))
        if isinstance(found, Stored) and found.format is format:
            return found
        if found.shape[1] % format.block:
            raise InputError(
                f"weights is {self.kind!r}, but {name} has {found.shape[1]} columns; valid: a "
                f"model whose "
                f"columns are a multiple of {format.block}, or stored"
            )
        return Stored(format, format.encode(unstored(found, torch.float32)))

    def needed(self, keeps: Callable[[str, torch.dtype], bool]) -> int:
        """Bytes of the weights in memory.

        Args:
            keeps: whether products of a type read a format as it is stored
                (`kernels.base.Backend.keeps`).
        """
        found = 0.0
        for entry in self.entries.values():
            kind = entry.kind if self.kind == "stored" or len(entry.shape) != 2 else self.kind
            form = FORMATS.get(kind.lower())
            each = float(self.dtype.itemsize)
            if form is not None and keeps(form.name, self.dtype):
                each = form.nbytes / form.block
            found += math.prod(entry.shape) * each
        return int(found)


class ModuleWeights:
    """Weights of a loaded transformers model, which stays as it is.

    Args:
        model: for which `decoder.fits`.
        layout: of it.
    """

    copies = True

    def __init__(self, model: Any, layout: Layout) -> None:
        self.layout, self._found = layout, dict(model.named_parameters(remove_duplicate=False))

    def get(self, name: str) -> Tensor | None:
        """A weight or bias by its name; None: there is none."""
        found = self._found.get(name)
        return None if found is None else found.detach()


def unstored(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """A weight as a tensor of a type; one that has it already is itself."""
    return (weight.decode() if isinstance(weight, Stored) else weight).to(dtype)


def check_tensors(
    found: Mapping[str, Entry],
    shapes: Mapping[str, tuple[int, ...]],
    types: Collection[str],
    where: str,
    optional: Collection[str] = (),
) -> None:
    """Hold all that may be read of a file against a table, before anything is read.

    Args:
        found: the tensors of the file by our names.
        shapes: of all that there may be, of which ``optional`` may be missing.
        types: that weights may have.
        where: the file, for messages.
    Raises:
        InputError: one is missing, of another shape or type, or one too many.
    """
    for name in shapes:
        if name not in found and name not in optional:
            raise InputError(f"{where} lacks the tensor {name}; valid: files where none is missing")
    for name, entry in found.items():
        if entry.shape != shapes.get(name) or entry.kind not in types:
            valid = (
                f"{shapes[name]} in {', '.join(types)}" if name in shapes else "a file without it"
            )
            raise InputError(
                f"{where}: tensor {entry.name} is {entry.shape} in {entry.kind}; valid: {valid}"
            )


# ---- safetensors ---------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        InputError: there are none, or their index cannot be read or names other files than those of
            the folder.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    where = f"model folder {folder}"
    if single.is_file():
        return [single]
    if not index.exists():
        raise InputError(f"{where} has no safetensors files")
    names = sorted(set(weight_map(index, where).values()))
    for name in names:
        if not (folder / name).is_file():
            raise InputError(
                f"{where} lacks {name}, which {index.name} names; valid: all of its files"
            )
    return [folder / name for name in names]


def weights_in(folder: Path, layout: Layout, dtype: torch.dtype, kind: str) -> Weights | None:
    """Weights of a checkpoint's files; None where they have other names, which transformers may
    know.

    Raises:
        InputError: files are missing or damaged, or shapes or types are others.
    """
    found = {entry.name: entry for file in weight_files(folder) for entry in entries_of(file)}
    found = {
        name: entry for name, entry in found.items() if not name.endswith("rotary_emb.inv_freq")
    }
    if (
        layout.tied
        and HEAD in found
        and EMBEDDING in found
        and found[HEAD][1:3] == found[EMBEDDING][1:3]
    ):
        if torch.equal(found[HEAD].get(), found[EMBEDDING].get()):
            del found[HEAD]
    if found.keys() != (shapes := layout.shapes()).keys():
        return None
    check_tensors(found, shapes, FLOATS, f"model folder {folder}")
    return Weights(layout, dtype, found, kind)


def entries_of(file: Path, what: str = "weight file") -> Iterator[Entry]:
    """The tensors of a safetensors file."""
    open_weights(file, what)  # which checks all that the header says
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
        said = json.loads(opened.read(begin - 8))
    said.pop("__metadata__", None)
    for name, about in said.items():
        kind, shape, (start, end) = (about[field] for field in ("dtype", "shape", "data_offsets"))
        read = partial(_read, what, file, begin + start, end - start, kind, shape)
        yield Entry(name, tuple(shape), kind, read)


def _read(what: str, file: Path, start: int, nbytes: int, kind: str, shape: list[int]) -> Tensor:
    with refused_as(f"{what} {file} cannot be read as safetensors"):
        found = mapped(file, start, nbytes)
        return (found if start % 8 == 0 else found.clone()).view(DENSE[kind]).view(shape)


def mapped(file: Path, start: int, nbytes: int) -> Tensor:
    """Bytes of a file, uint8: a private mapping, which leaves the process with the tensor."""
    before = start % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        part = mmap.mmap(
            opened.fileno(), before + nbytes, access=mmap.ACCESS_COPY, offset=start - before
        )
    return torch.frombuffer(part, dtype=torch.uint8, offset=before, count=nbytes)


def open_weights(path: Path, what: str = "weight file") -> Any:
    """A safetensors file, opened for reading; its library has checked that tensors lie apart and in
    the file.

    Args:
        what: the file is, for messages.
    Raises:
        InputError: it cannot be read, or its header is larger than a model's.
    """
    with refused_as(f"{what} {path} cannot be read as safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        if MOST_HEADER < size < path.stat().st_size:
            raise InputError(
                f"{what} {path} has a header of {size:,} bytes; valid: up to {MOST_HEADER:,}"
            )
        made = safe_open(path, framework="pt")
        count = len(made.keys())
    if count > MOST_TENSORS:
        raise InputError(f"{what} {path} has {count:,} tensors; valid: up to {MOST_TENSORS:,}")
    return made
