"""GGUF files byte by byte: what an honest writer would refuse to write."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.loader.gguf_header import ARRAY, KINDS, NUMBERS, TEXT, read_header

U32 = 4
I32 = 5
F32 = 6
BOOL = 7
U64 = 10
I64 = 11
F64 = 12
#: kinds of values by their types in Python, those of lists where they differ
ITEMS: dict[type, int] = {str: TEXT, int: I32, float: F32, bool: BOOL, list: ARRAY}

CODES = {kind: code for code, kind in KINDS.items()}


@dataclass
class Value:
    """A value of the header, or the bytes of one; ``item`` is of a list."""

    kind: int
    value: Any
    item: int = 0

    def packed(self) -> bytes:
        if isinstance(self.value, bytes):
            return self.value
        if self.kind == TEXT:
            return text(self.value)
        if self.kind == ARRAY:
            head = struct.pack("<IQ", self.item, len(self.value))
            return head + b"".join(Value(self.item, one).packed() for one in self.value)
        return struct.pack(f"<{NUMBERS[self.kind]}", self.value)


def text(value: str | bytes) -> bytes:
    """A text of the header."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


@dataclass(slots=True)
class Tensor:
    """A tensor's entry; dimensions as the file has them, columns first."""

    dims: tuple[int, ...]
    code: int
    offset: int
    data: bytes


@dataclass(slots=True)
class Draft:
    """A file to be changed and written: values and tensors by name, in order (a name may come
    twice)."""

    values: list[tuple[str | bytes, Value]]
    tensors: list[tuple[str, Tensor]]
    magic: bytes = b"GGUF"
    counts: tuple[int | None, int | None] = (None, None)
    cut: int | None = None

    @classmethod
    def of(cls, path: Path) -> Draft:
        """What a whole file says; a part of a split model stands for itself."""
        content = path.read_bytes()
        header = read_header(path)
        values: list[tuple[str | bytes, Value]] = []
        for key, value in header.metadata.items():
            item = ITEMS[type(value[0])] if isinstance(value, list) else 0
            values.append((key, Value({**ITEMS, int: U32}[type(value)], value, item)))
        tensors: list[tuple[str, Tensor]] = []
        for name, entry in header.tensors.items():
            data = content[entry.start : entry.start + entry.nbytes]
            tensors.append((name, Tensor(entry.shape[::-1], CODES[entry.kind], -1, data)))
        return cls(values, tensors)

    def set(self, key: str, value: Value | None) -> Draft:
        """A key's value; None takes it out."""
        at = next((i for i, (name, _) in enumerate(self.values) if name == key), None)
        if at is not None:
            self.values[at : at + 1] = [] if value is None else [(key, value)]
        elif value is not None:
            self.values.append((key, value))
        return self

    def tensor(self, name: str) -> Tensor:
        """A tensor's entry."""
        return next(entry for its_name, entry in self.tensors if its_name == name)

    def add(self, name: str, dims: tuple[int, ...], data: bytes, code: int = 0) -> Draft:
        """Another tensor."""
        self.tensors.append((name, Tensor(dims, code, -1, data)))
        return self

    def write(self, path: Path) -> Path:
        """Write the file."""
        tensors, keys = self.counts
        tensor_count = tensors or len(self.tensors)
        key_count = keys or len(self.values)
        parts = [self.magic, struct.pack("<IQQ", 3, tensor_count, key_count)]
        for key, value in self.values:
            parts += [text(key), struct.pack("<I", value.kind), value.packed()]
        data = bytearray()
        for name, entry in self.tensors:
            offset = entry.offset
            if offset < 0:
                data += bytes(-len(data) % 32)
                offset = len(data)
                data += entry.data
            parts += [
                text(name),
                struct.pack(f"<I{len(entry.dims)}Q", len(entry.dims), *entry.dims),
            ]
            parts.append(struct.pack("<IQ", entry.code, offset))
        header = b"".join(parts)
        content = header + bytes(-len(header) % 32) + bytes(data)
        path.write_bytes(content if self.cut is None else content[: self.cut])
        return path
