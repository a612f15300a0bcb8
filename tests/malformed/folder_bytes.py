"""Checkpoint folders byte by byte: what an honest writer would refuse to write."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.chats import chat_tokenizer
from tests.tiny import byte_model

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


@dataclass
class Folder:
    """A model's files to be changed and written.

    Attributes:
        files: contents by name.
        links: what names are links to.
        last: done to the folder when all is written.
    """

    files: dict[str, bytes]
    links: dict[str, str] = field(default_factory=dict)
    last: list[Callable[[Path], Any]] = field(default_factory=list)

    def said(self, name: str) -> dict[str, Any]:
        """What a JSON file says."""
        return json.loads(self.files.get(name, b"{}"))

    def say(self, name: str, said: Any) -> Folder:
        """Have a file say something, in JSON."""
        self.files[name] = json.dumps(said).encode()
        return self

    def set(self, name: str, /, **fields: Any) -> Folder:
        """Have a JSON object say some fields."""
        return self.say(name, {**self.said(name), **fields})

    def write(self, path: Path) -> Path:
        """Write the files into a folder of an empty one; the model's folder."""
        folder = path / "model"
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        for name, leads in self.links.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(leads)
        for do in self.last:
            do(folder)
        return folder


@cache
def _whole(family: str) -> Folder:
    with TemporaryDirectory() as made:
        folder = Path(made)
        byte_model(family).save_pretrained(folder)
        chat_tokenizer().save_pretrained(folder)
        return Folder({path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def base(family: str = "llama") -> Folder:
    """A whole model of a family, to be changed."""
    return deepcopy(_whole(family))


@dataclass
class Header:
    """A safetensors file to be changed: entries by name, in order (a name may come twice)."""

    entries: list[tuple[str, Any]]
    data: bytes
    size: int | None = None

    @classmethod
    def of(cls, content: bytes) -> Header:
        """What a whole file says."""
        (size,) = struct.unpack("<Q", content[:8])
        return cls(list(json.loads(content[8 : 8 + size]).items()), content[8 + size :])

    def entry(self, name: str) -> dict[str, Any]:
        """A tensor's entry."""
        return next(entry for called, entry in self.entries if called == name)

    def names(self) -> list[str]:
        """The names of the tensors."""
        return [name for name, _ in self.entries if name != "__metadata__"]

    def tensor(self, name: str) -> bytes:
        """A tensor's bytes."""
        start, end = self.entry(name)["data_offsets"]
        return self.data[start:end]

    def put(self, name: str, data: bytes | None, **fields: Any) -> Header:
        """Another tensor of a name (none of it: None), with all the others where they then lie."""
        made, entries, there = bytearray(), [], False
        for called, entry in self.entries:
            if called == "__metadata__":
                entries.append((called, entry))
                continue
            own = self.tensor(called)
            if called == name:
                there = True
                if data is None:
                    continue
                own, entry = data, {**entry, **fields}
            entries.append((called, {**entry, "data_offsets": [len(made), len(made) + len(own)]}))
            made += own
        if not there and data is not None:
            entries.append((name, {**fields, "data_offsets": [len(made), len(made) + len(data)]}))
            made += data
        self.entries, self.data = entries, bytes(made)
        return self

    def bytes(self) -> bytes:
        """The file."""
        inner = ", ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.entries)
        return packed(f"{{{inner}}}".encode(), self.data, self.size)


def packed(header: bytes, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file of a header; ``size``: what it says of the header's."""
    return struct.pack("<Q", len(header) if size is None else size) + header + data
