"""GGUF files: what they say of a model, and their tensors, read in place.

The `gguf` package reads the same, but takes seconds for a tokenizer's texts; here it is asked for names of
types and for tensors in formats that are not ours, and no more.

Files come from anybody: what a header says is held against what the file can hold before anything is made of
it, and no two tensors share a byte.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.formats.registry import BY_CODE
from tokenswift.loader.gguf import part_names
from tokenswift.types import InputError

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
TEXT, ARRAY = 8, 9  # types of values; the others are numbers:
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: types of tensors that torch has
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
#: their names, and those of our formats; the package that knows all takes longer to load than a header
NAMED = {0: "F32", 1: "F16", 30: "BF16"} | {code: form.name.upper() for code, form in BY_CODE.items()}
INTEGERS = {26: torch.int32, 27: torch.int64}  # no weights: maps of vocabularies
MOST_DIMS, MOST_DEPTH = 4, 4
#: more than any model's file has: bytes of a header, tensors, keys, and values of all lists together
MOST_HEADER, MOST_TENSORS, MOST_KEYS, MOST_VALUES = 1 << 26, 1 << 16, 1 << 16, 1 << 22
MOST_NAME = 1 << 16  # bytes of a name


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file.

    Attributes:
        shape: rows first.
        code: of its type.
        start, nbytes: where it is in the file.
        part: of a split file, from 0.
    """

    shape: tuple[int, ...]
    code: int
    start: int
    nbytes: int
    part: int = 0

    @property
    def kind(self) -> str:
        """The name of its type, as the file format's makers write it."""
        return _kind(self.code)


class GgufFile:
    """A GGUF file, or a split one as a whole.

    Args:
        path: of the file; of a split one its first part, with the others beside it.
        whole: whether its tensors are there; otherwise a file that was cut off behind its header will do.
    Raises:
        InputError: it cannot be read, is not a complete GGUF file of a known version, or not all parts of a
            model are there.

    Attributes:
        parts: its files.
        metadata: its values by key; numbers and texts, and lists of them.
        kinds: the numbers of their types.
        tensors: its tensors by name.
    """

    def __init__(self, path: Path, whole: bool = True) -> None:
        self.path, self.parts = path, [path]
        self._maps: dict[int, mmap.mmap] = {}
        first = self._read(0, whole)
        self.metadata, self.kinds, self.tensors = first.metadata, first.kinds, first.tensors
        count = self.metadata.get("split.count", 0)
        if count in (0, 1):
            return
        self.parts = [path.with_name(name) for name in part_names(path.name)]
        if len(self.parts) != count or self.metadata.get("split.no") != 0:
            raise InputError(
                f"model file {path} is one of {shown(count)} parts of a model; valid: all of them in a "
                "folder, as they were named first (…-00001-of-00003.gguf)"
            )
        for part in range(1, count):
            more = self._read(part, whole)
            said = [more.metadata.get(f"split.{name}") for name in ("count", "no")]
            if said != [count, part] or not self.tensors.keys().isdisjoint(more.tensors):
                raise InputError(
                    f"model file {self.parts[part]} is not a part of {path}; valid: one of its parts"
                )
            self.tensors |= {name: replace(one, part=part) for name, one in more.tensors.items()}

    def _read(self, part: int, whole: bool) -> _Reader:
        path = self.parts[part]
        try:
            return _Reader(self._mapped(part), whole)
        except OSError as error:
            raise InputError(f"model file {path} cannot be read ({error.strerror or error})") from error
        except (ValueError, struct.error, RecursionError, OverflowError, MemoryError) as error:
            raise InputError(
                f"model file {path} is not a complete GGUF file ({error}); valid: GGUF, version 2 or 3, "
                "little-endian"
            ) from error

    def __getitem__(self, name: str) -> Tensor | Stored:
        """A tensor: as it lies in the file, of a type of torch or one of our formats; in any other format
        (`foreign`) unpacked to float32.

        Raises:
            InputError: nobody here can unpack it.
        """
        entry = self.tensors[name]
        data = torch.frombuffer(
            self._mapped(entry.part), dtype=torch.uint8, offset=entry.start, count=entry.nbytes
        )
        if (kind := DENSE.get(entry.code) or INTEGERS.get(entry.code)) is not None:
            return data.view(kind).view(entry.shape)
        rows = data.view(*entry.shape[:-1], -1)
        if entry.code in BY_CODE and len(entry.shape) == 2:
            return Stored(BY_CODE[entry.code], rows)
        import gguf

        if not unpacks(entry.code):
            raise InputError(
                f"model file {self.path}: tensor {name} has the type {entry.kind}, which cannot be unpacked; "
                f"valid: {', '.join(format.name for format in BY_CODE.values())}, float types and those that "
                "the gguf package unpacks"
            )
        unpacked = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(entry.code))
        return torch.from_numpy(unpacked).view(entry.shape)

    def foreign(self, keeps: Callable[[str], bool] = lambda form: True) -> list[str]:
        """Names of the types of tensors that are neither torch's nor one of our formats that is kept."""
        return sorted(
            {
                e.kind
                for e in self.tensors.values()
                if e.code not in DENSE and not (e.code in BY_CODE and keeps(BY_CODE[e.code].name))
            }
        )

    def rest(self) -> None:
        """Let go of the mappings: what was read leaves the process with the last tensor of it."""
        self._maps = {}

    def _mapped(self, part: int) -> mmap.mmap:
        if part not in self._maps:
            with self.parts[part].open("rb") as file:
                # a private mapping: nothing that is done to a tensor reaches the file
                self._maps[part] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[part]


class _Reader:
    """Reads what stands before the tensors."""

    def __init__(self, data: mmap.mmap, whole: bool) -> None:
        self._data, self._at, self._values = data, 4, 0
        self._end = min(len(data), MOST_HEADER)
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        tensors, values = self._number("Q"), self._number("Q")
        if tensors > MOST_TENSORS or values > MOST_KEYS:
            raise ValueError(f"{tensors} tensors and {values} keys, at most {MOST_TENSORS} and {MOST_KEYS}")
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, int] = {}
        for _ in range(values):
            key = self._text(MOST_NAME)
            if key in self.metadata:
                raise ValueError(f"it has the key {shown(key)} twice")
            self.kinds[key] = self._number("I")
            self.metadata[key] = self._value(self.kinds[key])
        found = [self._tensor() for _ in range(tensors)]
        aligned = self.metadata.get("general.alignment", ALIGNMENT)
        if type(aligned) is not int or aligned < 8 or aligned & (aligned - 1):
            raise ValueError(f"alignment {shown(aligned)}, a power of two from 8 on is valid")
        start = -(-self._at // aligned) * aligned
        self.tensors: dict[str, Entry] = {}
        for name, shape, code, offset in found:
            nbytes = _nbytes(name, shape, code)
            if offset % aligned:
                raise ValueError(f"tensor {shown(name)} begins at {offset}, no multiple of {aligned}")
            if whole and start + offset + nbytes > len(data):
                raise ValueError(f"it ends before the end of tensor {shown(name)}")
            if name in self.tensors:
                raise ValueError(f"it has the tensor {shown(name)} twice")
            self.tensors[name] = Entry(shape, code, start + offset, nbytes)
        self._check_apart()

    def _check_apart(self) -> None:
        """No two tensors share bytes: else a small file could hold any number of large ones."""
        order = sorted(self.tensors.items(), key=lambda item: item[1].start)
        for (before, first), (name, second) in pairwise(order):
            if first.start + first.nbytes > second.start:
                raise ValueError(f"tensors {shown(before)} and {shown(name)} overlap")

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _text(self, most: int = MOST_HEADER) -> str:
        size = self._number("Q")
        if size > most:
            raise ValueError(f"a text of {size} bytes")
        start, self._at = self._at, self._at + size
        self._check_place()
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _texts(self, count: int) -> list[str]:
        """As many times :meth:`_text`: a vocabulary is most of a header."""
        data, end, at, found = self._data, self._end, self._at, []
        size_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + size_of(data, at)[0]
            if at > end:
                break
            found.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        self._check_place()
        return found

    def _check_place(self) -> None:
        if self._at > self._end:
            header = "" if self._end == len(self._data) else f" of the {MOST_HEADER >> 20} MB of a header"
            raise ValueError(f"it ends within a text or list{header}")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == ARRAY and depth < MOST_DEPTH:
            kind, count = self._number("I"), self._number("Q")
            self._values += count
            if self._values > MOST_VALUES:
                raise ValueError(f"lists of {self._values} values, at most {MOST_VALUES}")
            if kind == TEXT:
                return self._texts(count)
            if kind not in NUMBERS:
                return [self._value(kind, depth + 1) for _ in range(count)]
            start = self._at
            self._at += count * struct.calcsize(f"<{NUMBERS[kind]}")
            self._check_place()
            return list(struct.unpack_from(f"<{count}{NUMBERS[kind]}", self._data, start))
        if kind not in NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return self._number(NUMBERS[kind])

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._text(MOST_NAME), self._number("I")
        if not 0 < dims <= MOST_DIMS:
            raise ValueError(f"tensor {shown(name)} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")


def _nbytes(name: str, shape: tuple[int, ...], code: int) -> int:
    """Bytes of a tensor."""
    count = math.prod(shape)
    if count == 0:
        raise ValueError(f"tensor {shown(name)} has shape {shape}")
    if code in DENSE:
        return count * DENSE[code].itemsize
    if code in BY_CODE:
        block, size = BY_CODE[code].block, BY_CODE[code].nbytes
    else:
        import gguf

        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)]
        except (KeyError, ValueError):
            raise ValueError(f"tensor {shown(name)} is of type {code}, which nobody knows") from None
    if shape[-1] % block:
        raise ValueError(f"tensor {shown(name)} has rows of {shape[-1]} numbers in blocks of {block}")
    return count // block * size


@cache
def unpacks(code: int) -> bool:
    """Whether numbers can be made of a type's blocks: tried on one of zeros."""
    if code in DENSE or code in BY_CODE:
        return True
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType(code)
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, ValueError, KeyError):
        return False
    return True


def _kind(code: int) -> str:
    if code in NAMED:
        return NAMED[code]
    import gguf

    return gguf.GGMLQuantizationType(code).name
