"""Checkpoint folders byte by byte: what an honest writer would refuse to write."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.chats import chat_tokenizer
from tests.tiny import byte_model

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"


@dataclass
class Folder:
    """A model's files to be changed and written.

    Attributes:
        files: contents by name.
        last: done to the folder when all is written.
    """

    files: dict[str, bytes]
    last: list[Callable[[Path], object]] = field(default_factory=list)

    def object_in(self, name: str) -> dict[str, Any]:
        """What a JSON file says."""
        return json.loads(self.files.get(name, b"{}"))

    def put_object(self, name: str, object_in: object) -> Folder:
        """Have a file say something, in JSON."""
        self.files[name] = json.dumps(object_in).encode()
        return self

    def set(self, name: str, /, **fields: object) -> Folder:
        """Have a JSON object say some fields."""
        return self.put_object(name, {**self.object_in(name), **fields})

    def write(self, path: Path) -> Path:
        """Write the files into a folder of an empty one; the model's folder."""
        folder = path / "model"
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        for do in self.last:
            do(folder)
        return folder


@cache
def plain_folder() -> Folder:
    """A complete model."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        byte_model("llama").save_pretrained(folder)
        chat_tokenizer().save_pretrained(folder)
        return Folder({path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def edited(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A safetensors file with another header over the same bytes."""
    size = int.from_bytes(content[:8], "little")
    change(header := json.loads(content[8 : 8 + size]))
    return packed(json.dumps(header).encode(), content[8 + size :])


def packed(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file of a header."""
    return struct.pack("<Q", len(header)) + header + data
