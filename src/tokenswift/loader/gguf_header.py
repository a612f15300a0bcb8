"""The header of a GGUF file: its keys, and where its tensors are.

The `gguf` package reads the same, but takes seconds for a tokenizer's texts. Files come from
anybody: what a header says is held against what the file can hold before anything is made of it,
and no two tensors share a byte.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from tokenswift.checks import shown
from tokenswift.kernels.formats import BY_CODE
from tokenswift.loader.tensors import DENSE
from tokenswift.types import InputError

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
TEXT, ARRAY = 8, 9  # types of values; the others are numbers:
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
#: names of types by their numbers, as the file format's makers write them
KINDS = {0: "F32", 1: "F16", 30: "BF16", 26: "I32", 27: "I64"}
KINDS |= {code: form.name.upper() for code, form in BY_CODE.items()}
WEIGHTS = [name for name in KINDS.values() if name not in ("I32", "I64")]
MOST_DIMS = 4
#: more than any model's file has: bytes of a header, tensors, keys, and values of all lists
#: together
MOST_HEADER, MOST_TENSORS, MOST_KEYS, MOST_VALUES = 1 << 26, 1 << 16, 1 << 16, 1 << 22


class Place(NamedTuple):
    """A tensor of a file: its shape, rows first, the name of its type, and where it is in which
    file."""

    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int
    path: Path


def read_header(path: Path) -> Header:
    """The values and the tensors of one file, a whole model's or a part of one.

    Raises:
        InputError: it cannot be read, or is not a complete GGUF file of a known version.
    """
    where = f"model file {path}"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = Header(data, path)
    except OSError as error:
        raise InputError(f"{where} cannot be read ({error.strerror or error})") from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (ValueError, struct.error, RecursionError, OverflowError, MemoryError) as error:
        raise InputError(
            f"{where} is not a complete GGUF file ({error}); valid: GGUF, version 2 or 3, "
            "little-endian"
        ) from error
    return header


class Header:
    """What stands before the tensors of a file.

    Attributes:
        metadata: values by key.
        tensors: by name.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._at, self._values = data, 4, 0
        self._end = min(len(data), MOST_HEADER)
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        tensors, values = self._number("Q"), self._number("Q")
        if tensors > MOST_TENSORS or values > MOST_KEYS:
            raise ValueError(
                f"{tensors} tensors and {values} keys, at most {MOST_TENSORS} and {MOST_KEYS}"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            (key,) = self._texts(1)
            if key in self.metadata:
                raise ValueError(f"it has the key {shown(key)} twice")
            self.metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensors)]
        aligned = self.metadata.get("general.alignment", ALIGNMENT)
        if type(aligned) is not int or aligned < 8 or aligned & (aligned - 1):
            raise ValueError(f"alignment {shown(aligned)}, a power of two from 8 on is valid")
        start = -(-self._at // aligned) * aligned
        # in order and apart: else a small file could hold any number of large tensors
        self.tensors: dict[str, Place] = {}
        end = 0
        for offset, name, shape, code in sorted(found):
            nbytes = _nbytes(name, shape, code)
            if name in self.tensors or offset < end or offset % aligned:
                raise ValueError(
                    f"tensor {shown(name)} is there twice, overlaps another or is not aligned"
                )
            if (end := offset + nbytes) > len(data) - start:
                raise ValueError(f"it ends before the end of tensor {shown(name)}")
            self.tensors[name] = Place(shape, KINDS[code], start + offset, nbytes, path)

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _texts(self, count: int) -> list[str]:
        """Texts in a row: a vocabulary is most of a header."""
        data, end, at, found = self._data, self._end, self._at, []
        size_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + size_of(data, at)[0]
            if at > end:
                break
            found.append(data[start:at].decode("utf-8", "replace"))
        self._go_on(at - self._at)
        return found

    def _go_on(self, size: int) -> None:
        self._at += size
        if self._at > self._end:
            raise ValueError(
                f"it ends within a text or list, or its header exceeds {MOST_HEADER} bytes"
            )

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._texts(1)[0]
        if kind == ARRAY:
            kind, count = self._number("I"), self._number("Q")
            self._values += count
            if self._values > MOST_VALUES:
                raise ValueError(f"lists of {self._values} values, at most {MOST_VALUES}")
            if kind == TEXT:
                return self._texts(count)
            if kind not in NUMBERS:
                raise ValueError(f"a list of values of type {kind}")
            start = self._at
            self._go_on(count * struct.calcsize(f"<{NUMBERS[kind]}"))
            return list(struct.unpack_from(f"<{count}{NUMBERS[kind]}", self._data, start))
        if kind not in NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return self._number(NUMBERS[kind])

    def _tensor(self) -> tuple[int, str, tuple[int, ...], int]:
        (name,), dims = self._texts(1), self._number("I")
        if not 0 < dims <= MOST_DIMS:
            raise ValueError(f"tensor {shown(name)} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        code = self._number("I")
        return self._number("Q"), name, shape, code


def _nbytes(name: str, shape: tuple[int, ...], code: int) -> int:
    """Bytes of a tensor."""
    if code not in KINDS:
        raise InputError(
            f"tensor {shown(name)} is of type {code}, which is not known here; valid: a file in "
            f"another, "
            "such as Q4_K_M (llama.cpp's llama-quantize makes one)"
        )
    if (count := math.prod(shape)) == 0:
        raise ValueError(f"tensor {shown(name)} has shape {shape}")
    if (form := BY_CODE.get(code)) is None:
        return count * DENSE[KINDS[code]].itemsize
    if shape[-1] % form.block:
        raise ValueError(
            f"tensor {shown(name)} has rows of {shape[-1]} numbers in blocks of {form.block}"
        )
    return count // form.block * form.nbytes
