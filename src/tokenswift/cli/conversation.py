"""Conversations as files: written for people or programs, read back strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec

from tokenswift.cli.output import kind_of
from tokenswift.types import InputError

MOST_BYTES = 64 * 1024 * 1024
SHAPE = (
    'a JSON list as /save FILE.json writes it: [{"role": "user", "content": "…"}, {"role": "assistant", …}], '
    "one of role system first, or none, then user and assistant in turn"
)


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a file."""

    role: Literal["system", "user", "assistant"]
    content: str


def text_of(messages: list[dict[str, str]], path: Path) -> str:
    """The messages as a file has them: JSON for a name that ends in .json, else text."""
    if path.suffix == ".json":
        return json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
    return "\n\n".join(f"{m['role']}:\n{m['content']}" for m in messages) + "\n"


def read(name: str) -> list[dict[str, str]]:
    """The messages of a JSON file.

    Raises:
        InputError: it cannot be read, or is anything but a conversation that has ended with an answer; the
            line says where.
    """
    path = Path(name).expanduser()
    try:
        kind = kind_of(path)
        if kind not in ("", "file"):
            raise OSError(0, f"it is a {kind}")
        if kind and path.stat().st_size > MOST_BYTES:
            raise OSError(0, f"it has more than {MOST_BYTES // 2**20} MB")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"/load {name} cannot be read ({reason}); valid: {SHAPE}") from error
    try:
        found = msgspec.json.decode(content, type=list[Message])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(name, str(error)) from error
    first = int(bool(found) and found[0].role == "system")
    for place, message in enumerate(found[first:]):
        wanted = ("user", "assistant")[place % 2]
        if message.role != wanted:
            raise _bad(name, f"message {first + place + 1} is of role {message.role}, not {wanted}")
        if not message.content:
            raise _bad(name, f"message {first + place + 1} is empty")
    if (len(found) - first) % 2:
        raise _bad(name, "its last message has no answer")
    return msgspec.to_builtins(found)


def _bad(name: str, why: str) -> InputError:
    return InputError(f"/load {name}: {why}; valid: {SHAPE}")
