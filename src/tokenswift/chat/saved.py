"""Conversations in files: a list of messages in JSON, or an object whose ``messages`` is one, as a
line of a ``--prompts`` file is.

They may come from anybody, so their size and depth are bounded before anything is made of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenswift.checks import depth_and_size
from tokenswift.files import MOST_DEPTH, line_of, read_small, replacing
from tokenswift.types import InputError

MOST_BYTES = 1 << 26
VALID = "a conversation that /save wrote, a list of messages in JSON"


def read_messages(path: Path, name: str) -> list[object]:
    """The messages of a file; what they hold is checked by `messages.checked`.

    Args:
        name: what reads it, for errors, such as ``/load chat.json``.
    Raises:
        InputError: it cannot be read, is too large, or holds no messages.
    """
    try:
        value: object = json.loads(read_small(path, MOST_BYTES).decode("utf-8-sig"))
        if isinstance(value, dict):
            value = value.get("messages")
        if not isinstance(value, list) or not value:
            raise ValueError("it holds no messages")
        if depth_and_size(value, MOST_DEPTH)[0] > MOST_DEPTH:
            raise ValueError(f"it has objects or lists more than {MOST_DEPTH} deep")
    except (OSError, ValueError, RecursionError, RuntimeError) as error:
        raise InputError(f"{name} cannot be read ({line_of(error)}); valid: {VALID}") from error
    return value


def write_messages(path: Path, messages: Sequence[object], name: str, is_new: bool) -> None:
    """Write a conversation.

    Args:
        name: what writes it, for errors.
        is_new: the file must not be there yet; else a complete one takes its place.
    Raises:
        InputError: it cannot be written; a file that was there is as it was.
    """
    text = json.dumps(messages, ensure_ascii=False, indent=1)
    try:
        if is_new:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        else:
            with replacing(path) as part:
                part.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = line_of(error)
        raise InputError(f"{name} cannot be written ({reason}); valid: a new file") from error
