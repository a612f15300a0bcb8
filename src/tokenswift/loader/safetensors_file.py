"""Safetensors files: the one way in which they are opened and read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

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
        for name, stated in header.items():
            kind: str = stated["dtype"]
            shape = tuple(stated["shape"])
            start, end = stated["data_offsets"]
            read = partial(self._read, LENGTH + size + start, end - start, kind, shape)
            self.entries[name] = Entry(name, shape, kind, read)

    def _read(self, start: int, nbytes: int, kind: str, shape: tuple[int, ...]) -> Tensor:
        with refused_as(f"{self._where} cannot be read as safetensors"):
            values = mapped(self._path, start, nbytes)
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
