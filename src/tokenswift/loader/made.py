"""The model folders that we make in the cache: each has a record, and in it a list of the folder's files.

A folder counts as whole when every file of its list has the size and the time that it had when it was made,
or else the same content. What fails is made anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tokenswift.files import read_small, replacing
from tokenswift.loader.identity import file_digest

RECORD = "tokenswift.json"


class _File(msgspec.Struct):
    """A file's size in bytes, its time of change in nanoseconds and its SHA-256."""

    size: int
    mtime: int
    sha256: str


class _Record(msgspec.Struct):
    """What is read of a record: the SHA-256 of what the folder was made from, the version of the making, and
    the files (None: of an earlier version, which listed none)."""

    sha256: str
    format: int
    files: dict[str, _File] | None = None


def write_record(folder: Path, known: Mapping[str, Any]) -> None:
    """Write a finished folder's record.

    Args:
        known: its fields besides the list of files.
    """
    files = {path.name: _entry(path) for path in sorted(folder.iterdir()) if path.name != RECORD}
    text = json.dumps({**known, "files": msgspec.to_builtins(files)}, indent=1) + "\n"
    with replacing(folder / RECORD) as part:
        part.write_text(text, encoding="utf-8")


def fault(folder: Path, sha256: str, version: int) -> str | None:
    """What is wrong with a folder, in a few words; None for a whole one.

    Args:
        sha256: of what it should have been made from.
        version: of the making.
    """
    try:
        content = read_small(folder / RECORD)
        record = msgspec.json.decode(content, type=_Record)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return f"{RECORD} is missing or damaged"
    if (record.sha256, record.format) != (sha256, version):
        return "it was made by another version"
    files = record.files
    if files is None:
        wrong, times = _unsound(folder), False
    else:
        wrong = next((name for name, file in files.items() if not _fits(folder / name, file)), None)
        times = all(_times_fit(folder / name, file) for name, file in files.items())
    if wrong is not None:
        return f"{wrong[:80]} is missing or damaged"
    if not times:  # found good by its content: from now on its times tell
        with suppress(OSError):
            write_record(folder, {k: v for k, v in json.loads(content).items() if k != "files"})
    return None


def _entry(path: Path) -> _File:
    found = path.stat()
    return _File(found.st_size, found.st_mtime_ns, file_digest(path))


def _times_fit(path: Path, file: _File) -> bool:
    try:
        found = path.stat()
        return path.is_file() and (found.st_size, found.st_mtime_ns) == (file.size, file.mtime)
    except (OSError, ValueError):  # not there, or no name of a file
        return False


def _fits(path: Path, file: _File) -> bool:
    try:
        return _times_fit(path, file) or (
            path.is_file() and path.stat().st_size == file.size and file_digest(path) == file.sha256
        )
    except (OSError, ValueError):
        return False


def _unsound(folder: Path) -> str | None:
    """The file that can be seen to be damaged in a folder without a list; None where there is none."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
        except (OSError, ValueError, RecursionError, SafetensorError):
            return path.name
    return None
