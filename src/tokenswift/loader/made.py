"""The model folders that we make in the cache: each has a record, and in it a list of the folder's files.

All work happens in a ``*.partial`` folder beside the final one, under a lock, and one rename ends it: what an
interruption left is removed by the next attempt. A folder counts as whole when every file of its list has the
size and the time that it had when it was made, or else the same content. What fails is made anew.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from tokenswift.files import read_small, replacing
from tokenswift.loader.identity import file_digest
from tokenswift.types import InputError, RunError

RECORD = "tokenswift.json"
logger = logging.getLogger("tokenswift")


class _File(msgspec.Struct):
    """A file's size in bytes, its time of change in nanoseconds and its SHA-256."""

    size: int
    mtime: int
    sha256: str


class _Record(msgspec.Struct):
    """What is read of a record: the SHA-256 of what the folder was made from, the version of the making, and
    the files."""

    sha256: str
    format: int
    files: dict[str, _File]


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
        record = msgspec.json.decode(read_small(folder / RECORD), type=_Record)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return f"{RECORD} is missing or damaged"
    if (record.sha256, record.format) != (sha256, version):
        return "it was made by another version"
    wrong = next((name for name, file in record.files.items() if not _fits(folder / name, file)), None)
    return None if wrong is None else f"{wrong[:80]} is missing or damaged"


def made_whole(folder: Path, sha256: str, version: int, need: str, make: Callable[[Path], None]) -> None:
    """Make a folder of the cache unless it is there, whole.

    Args:
        sha256, version: as of :func:`fault`.
        need: the room that it takes, in words.
        make: makes the folder ``model``, its record included, in the empty folder that it is given.
    Raises:
        InputError: the cache folder cannot be written.
        RunError: the disk is full.
    """
    if fault(folder, sha256, version) is None:
        return
    with lock(folder, need):
        reason = fault(folder, sha256, version)
        if reason is None:  # another process made it while we waited
            return
        if folder.exists():
            logger.warning("the model folder %s is rebuilt: %s", folder, reason)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            make(partial)
            _sync(partial / "model")
            if folder.exists():  # put aside in one step
                folder.rename(partial / "old")
            (partial / "model").rename(folder)
            _sync(folder.parent, files=False)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def lock(folder: Path, need: str) -> Iterator[None]:
    """Hold the lock of a folder of the cache; faults of the disk become errors with a line of advice."""
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")  # the system releases it when its holder dies
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.warning("another process is making the model %s; waiting for it", folder.name)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise RunError(no_space(cache, need)) from error
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror or error}); "
            "set TOKENSWIFT_CACHE to a folder with write access"
        ) from error


def _sync(folder: Path, files: bool = True) -> None:
    """Flush a folder, and the files in it, to disk, so that a rename never outruns their content."""
    for path in [*(folder.iterdir() if files else ()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def no_space(folder: Path, need: str) -> str:
    """In words that the disk is full."""
    return (
        f"no space left in {folder}: {need}; nothing was kept. "
        "Free some, or set TOKENSWIFT_CACHE to a folder on another disk"
    )


def _entry(path: Path) -> _File:
    found = path.stat()
    return _File(found.st_size, found.st_mtime_ns, file_digest(path))


def _fits(path: Path, file: _File) -> bool:
    try:
        found = path.stat()
        if not path.is_file() or found.st_size != file.size:
            return False
        return found.st_mtime_ns == file.mtime or file_digest(path) == file.sha256
    except (OSError, ValueError):  # not there, or no name of a file
        return False
