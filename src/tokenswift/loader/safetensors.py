"""safetensors files from anybody, opened within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tokenswift.types import InputError

#: more than any model's file has: bytes of a header, tensors
MOST_HEADER, MOST_TENSORS = 1 << 24, 1 << 16


def open_weights(path: Path, what: str = "weight file") -> Any:
    """A safetensors file, opened for reading; its library has checked that tensors lie apart and in the file.

    Args:
        what: the file is, for messages.
    Raises:
        InputError: it cannot be read, or its header is larger than a model's.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        if MOST_HEADER < size < path.stat().st_size:
            raise InputError(f"{what} {path} has a header of {size:,} bytes; valid: up to {MOST_HEADER:,}")
        made = safe_open(path, framework="pt")
        count = len(made.keys())
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{what} {path} cannot be read as safetensors ({reason})") from error
    if count > MOST_TENSORS:
        raise InputError(f"{what} {path} has {count:,} tensors; valid: up to {MOST_TENSORS:,}")
    return made
