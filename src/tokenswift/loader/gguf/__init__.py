"""GGUF files: which file a path means; light."""

from __future__ import annotations

import re
from pathlib import Path

from tokenswift.types import InputError

#: what is valid where there is an adapter
MERGED = (
    "the model that it was merged into (PEFT's merge_and_unload, then save_pretrained), or LLM.from_model "
    "with PEFT's model"
)
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """The names of a model's files, of which one is given: itself, or all parts of a split file in order."""
    found = PART.fullmatch(name)
    if found is None:
        return [name]
    stem, _, count, end = found.groups()
    return [f"{stem}-{number:05}-of-{count}{end}" for number in range(1, int(count) + 1)]


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder that has no other weights; of a split
    file the first part; light.

    Raises:
        InputError: a folder holds several.
    """
    if path.is_file():
        return path.with_name(part_names(path.name)[0]) if path.name.lower().endswith(".gguf") else None
    if not path.is_dir():
        return None
    files = sorted(file.name for file in path.iterdir() if file.is_file())
    found = [file for file in files if file.lower().endswith(".gguf")]
    if not found or any(file.endswith((".safetensors", ".bin", ".index.json")) for file in files):
        return None
    if found != part_names(found[0]) and len(found) > 1:
        names = ", ".join(found[:3])
        raise InputError(f"model folder {path} holds {len(found)} GGUF files ({names}); valid: one of them")
    return path / found[0]
