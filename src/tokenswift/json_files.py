"""The JSON files of a checkpoint folder, read within bounds: they come from anybody, and parsers of other
libraries read them after us."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenswift.checks import shown
from tokenswift.files import read_small
from tokenswift.types import InputError

#: more than any model's files have: bytes of a config, of a file of its tokenizer, and of weights' index
MOST_CONFIG, MOST_TOKENIZER, MOST_INDEX = 1 << 24, 1 << 26, 1 << 26
#: objects and lists in each other, and fields of the outermost
MOST_DEPTH, MOST_FIELDS = 64, 4096


def object_in(path: Path, most: int, where: str) -> dict[str, Any]:
    """The object that a file holds.

    Args:
        most: bytes.
        where: whose the file is, for messages.
    Raises:
        InputError: it is no regular file, is larger, or is anything else than a JSON object in UTF-8.
    """
    try:
        said = json.loads(read_small(path, most).decode())
        reason = None
        if not isinstance(said, dict):
            reason = "it is not an object"
        elif len(said) > MOST_FIELDS:
            reason = f"it has {len(said):,} fields, at most {MOST_FIELDS:,} are valid"
        elif _is_deep(said):
            reason = f"it has objects or lists more than {MOST_DEPTH} deep"
    except (OSError, ValueError, RecursionError) as error:
        reason = line_of(error)
    if reason is not None:
        raise InputError(
            f"{where}: its {path.name} cannot be used ({reason}); valid: a JSON object of up to "
            f"{most >> 20} MB"
        )
    return said


def weight_map(index: Path, where: str, kinds: Sequence[str] = ("safetensors",)) -> dict[str, str]:
    """The files of a sharded checkpoint by the names of their tensors.

    Args:
        index: file that says so.
        where: whose it is, for messages.
        kinds: endings that files may have.
    Raises:
        InputError: it cannot be read, is empty, or names anything but such files of its own folder.
    """
    said = object_in(index, MOST_INDEX, where).get("weight_map")
    if not isinstance(said, dict) or not said:
        raise InputError(
            f"{where}: weight_map of {index.name} is {shown(said)}; valid: files of tensors by name"
        )
    valid = re.compile(rf"[\w.-]{{1,243}}\.({'|'.join(kinds)})", re.ASCII)
    for name in said.values():
        if not isinstance(name, str) or valid.fullmatch(name) is None:
            raise InputError(
                f"{where}: {index.name} names the file {shown(name)}; valid: {' or '.join(kinds)} files of "
                "the folder"
            )
    return said


def _is_deep(said: Any) -> bool:
    """Whether values lie deeper than `MOST_DEPTH` objects and lists."""
    level = [said] if isinstance(said, dict | list) else []
    for _ in range(MOST_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for values in inner for one in values if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def line_of(error: BaseException) -> str:
    """What an error says, as a piece of a line."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return " ".join((text or str(error)).split())[:160] or type(error).__name__
