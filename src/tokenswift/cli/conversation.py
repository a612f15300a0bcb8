"""Conversations as files: written for people or programs, read back strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenswift.cli.output import kind_of
from tokenswift.types import InputError

MOST_BYTES = 64 * 1024 * 1024
SHAPE = (
    'a JSON list as /save FILE.json writes it: [{"role": "user", "content": "…"}, {"role": "assistant", …}], '
    "one of role system first, or none, then user and assistant in turn"
)


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
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(name, f"it is not UTF-8 (byte {error.start})") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"/load {name} cannot be read ({reason}); valid: {SHAPE}") from error
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _bad(name, f"it is no JSON ({error})") from error
    if not isinstance(found, list):
        raise _bad(name, "it is no list of messages")
    for number, message in enumerate(found, 1):
        if fault := _fault(message):
            raise _bad(name, f"message {number} {fault}")
    first = int(bool(found) and found[0]["role"] == "system")
    for place, message in enumerate(found[first:]):
        wanted = ("user", "assistant")[place % 2]
        if message["role"] != wanted:
            raise _bad(name, f"message {first + place + 1} is of role {message['role']}, not {wanted}")
    if (len(found) - first) % 2:
        raise _bad(name, "its last message has no answer")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return made


def _fault(message: Any) -> str:
    """What is wrong with one message; "" for nothing."""
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        return "does not have role and content and nothing else"
    if message["role"] not in ("system", "user", "assistant"):
        return "has a role that is none of system, user, assistant"
    content = message["content"]
    if not isinstance(content, str) or (not content and message["role"] != "system"):
        return "has a content that is no text"
    if any("\ud800" <= letter <= "\udfff" for letter in content):
        return "has half a character (a lone surrogate)"
    return ""


def _bad(name: str, why: str) -> InputError:
    return InputError(f"/load {name}: {why}; valid: {SHAPE}")
