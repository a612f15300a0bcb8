"""Characters that command a terminal, made visible: a model may write them, and the terminal would obey."""

from __future__ import annotations

import os
import re
from typing import IO

#: control characters but line end and tab, DEL, C1; what turns the direction of writing; separators that are
#: line ends to some; deprecated, annotation and tag characters, which hide text
COMMANDING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """The text with commanding characters written as JSON writes them: ``\\u001b``.

    Each character is looked at by itself, so a text may come in any pieces; JSON stays the same JSON.
    """
    return COMMANDING.sub(_written, text)


def shown_on(stream: IO[str], text: str, raw: bool = False) -> str:
    """The text as a stream is to get it: visible on a terminal unless ``raw``, elsewhere as it is."""
    return visible(text) if not raw and stream.isatty() else text


def one_place(out: IO[str], err: IO[str]) -> bool | None:
    """Whether two streams go to the same terminal, pipe or file; None where they are no files at all."""
    try:
        return os.path.samestat(os.fstat(out.fileno()), os.fstat(err.fileno()))
    except (OSError, ValueError):
        return None


def _written(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
