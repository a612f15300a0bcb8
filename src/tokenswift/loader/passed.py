"""What passed the checks of a load on this machine, so that the next load need not repeat them.

The checks of model files: that the native decoder's logits are the reference's, and that ``tokenizer.json``
can be loaded within bounds. What is kept of them is one number, how far the logits were, under a name that
stands for the very files (names, sizes, times, content: large ones in samples), versions, sources, kernels,
and what was asked for. The check of compiled kernels: that the bits of a row are its own affair. Its name
stands for library, compiler, processor, versions and sources.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from tokenswift.files import read_small, replacing
from tokenswift.version import __version__

WHOLE = 1 << 24  # bytes of a file up to which all of it is read for its name
PLACES, BLOCK = 64, 1 << 14  # of a larger one: places, and bytes at each
MOST = 64  # marks that are kept, those read last
#: packages whose version matters, and our sources that read and run models
PACKAGES = ("torch", "tokenizers", "safetensors", "gguf")
SOURCES = ("", "models", "loader", "loader/gguf", "kernels", "kernels/cpu", "kernels/formats")


def key_of(folder: Path, *wishes: object) -> str:
    """The name for the files of a model folder, or for a model that is one file.

    Args:
        wishes: what else decides: type, positions, kernels.
    Raises:
        OSError: a file cannot be read.
    """
    made = _begun(wishes)
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        about = path.stat()
        made.update(repr((path.name, path.is_file(), about.st_size, about.st_mtime_ns)).encode())
        if path.is_file():
            _content(path, about.st_size, made.update)
    return made.hexdigest()[:32]


def key_of_kernels(*about: object) -> str:
    """The name for a compiled library.

    Args:
        about: what stands for its code and the processor.
    """
    return _begun(about).hexdigest()[:32]


def _begun(wishes: tuple[object, ...]) -> Any:
    """A hash of versions, of our sources, and of what else decides."""
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return hashlib.sha256(repr((__version__, versions, _sources(), wishes)).encode())


def _content(path: Path, size: int, take: Callable[[bytes], object]) -> None:
    """Hand on what stands for a file's content."""
    with path.open("rb") as file:
        if size <= WHOLE:
            take(file.read())
            return
        for place in range(PLACES):
            file.seek((size - BLOCK) * place // (PLACES - 1))
            take(file.read(BLOCK))


@cache
def _sources() -> str:
    made, package = hashlib.sha256(), resources.files("tokenswift")
    for name in SOURCES:
        for entry in sorted(package.joinpath(name).iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                made.update(entry.read_bytes())
    return made.hexdigest()


def read(folder: Path, key: str) -> float | None:
    """How far the logits were; None where nothing (or no such number) is kept under that name."""
    path = folder / key
    try:
        far = float(read_small(path, 64))
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        _touch(path)
    return far if math.isfinite(far) and far >= 0 else None


def write(folder: Path, key: str, far: float) -> None:
    """Keep that files passed; where that cannot be done, the next load checks again."""
    with suppress(OSError):
        with replacing(folder / key) as part:
            part.write_text(repr(far), encoding="ascii")
            _touch(part)
        there = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in there[MOST:]:
            path.unlink()


def _touch(path: Path) -> None:
    """The marks that nobody reads go first; by our own clock, as the system stamps files in ticks."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
