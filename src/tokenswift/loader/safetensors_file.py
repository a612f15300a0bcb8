"""Safetensors files: the one way in which they are opened and read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tokenswift.files import weight_map
from tokenswift.loader.errors import refused_as
from tokenswift.loader.tensors import DENSE, MOST_TENSORS, Entry, mapped
from tokenswift.types import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: more bytes of a header than any model's file has
MOST_HEADER = 1 << 24
#: bytes before the header, which say how long it is
LENGTH = 8
METADATA = "__metadata__"


class SafetensorsFile:
    """A safetensors file, whose library has checked that tensors lie apart and in the file.

    Each read maps its part of the file anew, so that it leaves the process with the tensor.

    Args:
        path: of the file.
        label: what the file is, for messages.
    Raises:
        InputError: it cannot be read, or has a larger header or more tensors than a model's.

    Attributes:
        metadata: texts by name, from the header.
        entries: its tensors by name.
    """

    def __init__(self, path: Path, label: str = "weight file") -> None:
        self._where = f"{label} {path}"
        self._path = path
        with refused_as(f"{self._where} cannot be read as safetensors"):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(LENGTH), "little")
                if MOST_HEADER < size < path.stat().st_size:
                    raise InputError(
                        f"{self._where} has a header of {size:,} bytes; "
                        f"valid: up to {MOST_HEADER:,}"
                    )
                count = len(safe_open(path, framework="pt").keys())
                if count > MOST_TENSORS:
                    raise InputError(
                        f"{self._where} has {count:,} tensors; valid: up to {MOST_TENSORS:,}"
                    )
                header = json.loads(file.read(size))
        self.metadata: dict[str, str] = header.pop(METADATA, None) or {}
        self.entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[int, int]] = {}  # where a tensor's bytes begin and end
        for name, stated in header.items():
            start, end = stated["data_offsets"]
            self._places[name] = (LENGTH + size + start, LENGTH + size + end)
            shape = tuple(stated["shape"])
            self.entries[name] = Entry(name, shape, stated["dtype"], partial(self.read, name))

    def read(self, name: str) -> Tensor:
        """A tensor."""
        start, end = self._places[name]
        return self._read(name, start, end, self.entries[name].shape)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """The rows ``first`` to ``last`` of a tensor, the last not included: no others are read."""
        start, end = self._places[name]
        count, *inner = self.entries[name].shape
        row_bytes = (end - start) // max(1, count)
        first = min(first, count)
        last = min(max(first, last), count)
        shape = (last - first, *inner)
        return self._read(name, start + first * row_bytes, start + last * row_bytes, shape)

    def _read(self, name: str, start: int, end: int, shape: tuple[int, ...]) -> Tensor:
        kind = self.entries[name].kind
        with refused_as(f"{self._where} cannot be read as safetensors"):
            if start == end:
                return torch.empty(shape, dtype=DENSE[kind])
            values = mapped(self._path, start, end - start)
            if start % 8 != 0:  # a view of wider numbers has to begin at a multiple of their size
                values = values.clone()
            return values.view(DENSE[kind]).view(shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        InputError: there are none, or their index cannot be read or names other files than those of
            the folder.
    """
    index = folder / INDEX
    single = folder / SINGLE
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
