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
from tokenswift.loader.tensors import DENSE, MOST_TENSORS
from tokenswift.types import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: bytes whose multiple tensors begin at, where the file does not say so itself
ALIGNMENT = 32
#: types of values; the others are numbers
TEXT = 8
ARRAY = 9
#: types of numbers, as `struct` writes them
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
#: names of tensors' types by their numbers, as the file format's makers write them
KINDS = {
    0: "F32",
    1: "F16",
    26: "I32",
    27: "I64",
    30: "BF16",
    **{code: form.name.upper() for code, form in BY_CODE.items()},
}
#: types that weights may have
WEIGHTS = [name for name in KINDS.values() if name not in ("I32", "I64")]
#: more than any model's file has: dimensions of a tensor, bytes of a header, keys, and values of
#: all lists together
MOST_DIMENSIONS = 4
MOST_HEADER = 1 << 26
MOST_KEYS = 1 << 16
MOST_VALUES = 1 << 22


class Place(NamedTuple):
    """Where a tensor is.

    Attributes:
        shape: its shape, rows first.
        kind: the name of its type, of `KINDS`.
        start: its first byte in the file.
        nbytes: its bytes.
        path: the file.
    """

    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int
    path: Path


class _Stated(NamedTuple):
    """What a header says of a tensor; in the order in which tensors lie in the file."""

    offset: int
    name: str
    shape: tuple[int, ...]
    code: int


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

    Args:
        data: the file.
        path: its path, for the places of its tensors.
    Raises:
        ValueError, struct.error, InputError: it is no complete GGUF file.

    Attributes:
        metadata: values by key.
        tensors: by name.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._position = len(MAGIC)
        self._values = 0  # of all lists so far
        self._end = min(len(data), MOST_HEADER)
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._integer("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        tensors = self._integer("Q")
        keys = self._integer("Q")
        if tensors > MOST_TENSORS or keys > MOST_KEYS:
            raise ValueError(
                f"{tensors} tensors and {keys} keys, at most {MOST_TENSORS} and {MOST_KEYS}"
            )
        self.metadata: dict[str, object] = {}
        for _ in range(keys):
            key = self._text()
            if key in self.metadata:
                raise ValueError(f"it has the key {shown(key)} twice")
            self.metadata[key] = self._value(self._integer("I"))
        stated = [self._tensor() for _ in range(tensors)]
        self.tensors = self._places(stated, path)

    def _places(self, stated: list[_Stated], path: Path) -> dict[str, Place]:
        """Tensors in order and apart: else a small file could hold any number of large ones."""
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"alignment {shown(alignment)}, a power of two from 8 on is valid")
        start = -(-self._position // alignment) * alignment
        places: dict[str, Place] = {}
        end = 0
        for offset, name, shape, code in sorted(stated):
            nbytes = _nbytes(name, shape, code)
            if name in places or offset < end or offset % alignment:
                raise ValueError(
                    f"tensor {shown(name)} is there twice, overlaps another or is not aligned"
                )
            end = offset + nbytes
            if end > len(self._data) - start:
                raise ValueError(f"it ends before the end of tensor {shown(name)}")
            places[name] = Place(shape, KINDS[code], start + offset, nbytes, path)
        return places

    def _number(self, kind: str) -> Any:  # an int, a float or a bool, as the kind has it
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._position)
        self._position += struct.calcsize(f"<{kind}")
        return value

    def _integer(self, kind: str) -> int:
        return self._number(kind)

    def _text(self) -> str:
        (text,) = self._texts(1)
        return text

    def _texts(self, count: int) -> list[str]:
        """Texts in a row: a vocabulary is most of a header."""
        data = self._data
        header_end = self._end
        end = self._position
        texts: list[str] = []
        size_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = end + 8
            end = start + size_of(data, end)[0]
            if end > header_end:
                break
            texts.append(data[start:end].decode("utf-8", "replace"))
        self._go_on(end - self._position)
        return texts

    def _go_on(self, size: int) -> None:
        self._position += size
        if self._position > self._end:
            raise ValueError(
                f"it ends within a text or list, or its header exceeds {MOST_HEADER} bytes"
            )

    def _value(self, kind: int) -> object:
        if kind == TEXT:
            return self._text()
        if kind == ARRAY:
            return self._list()
        if kind not in NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return self._number(NUMBERS[kind])

    def _list(self) -> list[object]:
        kind = self._integer("I")
        count = self._integer("Q")
        self._values += count
        if self._values > MOST_VALUES:
            raise ValueError(f"lists of {self._values} values, at most {MOST_VALUES}")
        if kind == TEXT:
            return [*self._texts(count)]
        if kind not in NUMBERS:
            raise ValueError(f"a list of values of type {kind}")
        start = self._position
        self._go_on(count * struct.calcsize(f"<{NUMBERS[kind]}"))
        return list(struct.unpack_from(f"<{count}{NUMBERS[kind]}", self._data, start))

    def _tensor(self) -> _Stated:
        name = self._text()
        dimensions = self._integer("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {shown(name)} has {dimensions} dimensions")
        columns_first = [self._integer("Q") for _ in range(dimensions)]
        code = self._integer("I")
        offset = self._integer("Q")
        return _Stated(offset, name, tuple(reversed(columns_first)), code)


def _nbytes(name: str, shape: tuple[int, ...], code: int) -> int:
    """Bytes of a tensor."""
    if code not in KINDS:
        raise InputError(
            f"tensor {shown(name)} is of type {code}, which is not known here; valid: a file in "
            "another, such as Q4_K_M (llama.cpp's llama-quantize makes one)"
        )
    count = math.prod(shape)
    if count == 0:
        raise ValueError(f"tensor {shown(name)} has shape {shape}")
    form = BY_CODE.get(code)
    if form is None:
        return count * DENSE[KINDS[code]].itemsize
    if shape[-1] % form.block:
        raise ValueError(
            f"tensor {shown(name)} has rows of {shape[-1]} numbers in blocks of {form.block}"
        )
    return count // form.block * form.nbytes
