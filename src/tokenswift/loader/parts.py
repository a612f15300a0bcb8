"""GGUF models that are split into several files, by the names that llama.cpp gives them.

``NAME-00001-of-00003.gguf`` is the first of three files. Light: no torch in here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

GGUF_END = ".gguf"
#: greatest number of files of a model; the largest of known ones have about 200
MOST_PARTS = 1024
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """Names of all files of the model that a file is a part of, in order.

    Args:
        name: of a file, with or without folders before it. One that is not named as a part is a
            model of its own, and so is one whose number is not from 1 to the number of parts.
    """
    named = _PART.fullmatch(name)
    if named is None:
        return [name]
    stem = named[1]
    number = int(named[2])
    count = int(named[3])
    if not 1 <= number <= count <= MOST_PARTS:
        return [name]
    end = name[len(name) - len(GGUF_END) :]
    return [f"{stem}-{part:05}-of-{count:05}{end}" for part in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """All files of the model that a file is a part of, in order, whether they are there or not."""
    return [path.with_name(name) for name in part_names(path.name)]


def first_parts(names: Sequence[str]) -> list[str]:
    """One name for each model among names of GGUF files: the first that is there of its parts."""
    models: dict[str, str] = {}
    for name in sorted(names):
        models.setdefault(part_names(name)[0], name)
    return list(models.values())
