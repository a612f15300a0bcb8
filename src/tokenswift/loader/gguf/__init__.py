"""GGUF files: which file a path means; light."""

from __future__ import annotations

from pathlib import Path

from tokenswift.types import InputError


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder that has no other weights; light.

    Raises:
        InputError: a folder holds several.
    """
    if path.is_file():
        return path if path.name.lower().endswith(".gguf") else None
    if not path.is_dir():
        return None
    files = sorted(file.name for file in path.iterdir() if file.is_file())
    found = [file for file in files if file.lower().endswith(".gguf")]
    if not found or any(file.endswith((".safetensors", ".bin", ".index.json")) for file in files):
        return None
    if len(found) > 1:
        names = ", ".join(found[:3])
        raise InputError(f"model folder {path} holds {len(found)} GGUF files ({names}); valid: one of them")
    return path / found[0]
