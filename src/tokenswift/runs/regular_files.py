"""Regular files of a folder that may come from anybody: nothing is reached through a link."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from tokenswift.checks import shown
from tokenswift.files import replacing, sync
from tokenswift.types import InputError


def check_regular(path: Path, handle: int | None = None) -> None:
    """Refuse what is there (or open) unless it is a regular file of that name alone; nothing may be
    there.

    Raises:
        InputError: naming it.
    """
    with suppress(FileNotFoundError):
        status = os.lstat(path) if handle is None else os.fstat(handle)
        is_link = stat.S_ISLNK(status.st_mode) or status.st_nlink > 1
        if is_link or not stat.S_ISREG(status.st_mode):
            kind = "a link" if is_link else "no regular file"
            raise InputError(
                f"run_dir {path.parent} holds {shown(path.name)}, which is {kind}; valid: a "
                "folder of a run's own files, regular ones"
            )


def open_regular(path: Path, flags: int) -> FileIO:
    """A regular file, open for reading or for writing.

    Raises:
        InputError: it is none, or has a second name.
        OSError: as the system says.
    """
    check_regular(path)  # opening a device or a pipe can have effects of its own
    reads = flags & os.O_ACCMODE == os.O_RDONLY
    file = FileIO(
        os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644), "rb" if reads else "wb"
    )
    try:
        check_regular(path, file.fileno())
    except InputError:
        file.close()
        raise
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises: as :func:`open_regular`.
    """
    with open_regular(path, os.O_RDONLY) as file:
        return file.readall()


def write_all(file: FileIO, data: bytes) -> None:
    """Write bytes to a file, however many the system takes at a time, and sync it.

    Raises:
        OSError: as the system says (no space left).
    """
    written = 0
    while written < len(data):
        written += file.write(data[written:])
    sync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write a regular file completely or not at all: part file, sync, rename, sync of the folder.

    Raises:
        InputError: something else is there.
        OSError: as the system says.
    """
    check_regular(path)
    with replacing(path) as part:
        part.write_bytes(data)
