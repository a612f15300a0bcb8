"""The files of a run's folder, which may come from anybody: regular ones, never through a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tokenswift.config import shown
from tokenswift.files import sync
from tokenswift.types import InputError

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_entries(folder: Path) -> list[str]:
    """The names in a run's folder, sorted; none where there is no folder.

    Raises:
        InputError: a link, a pipe, a device or a socket is among them.
        OSError: as the system says.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    for entry in found:
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            check_regular(Path(entry.path))
    return [entry.name for entry in found]


def check_regular(path: Path) -> None:
    """Refuse what is there unless it is a regular file; nothing may be there.

    Raises:
        InputError: naming what it is.
    """
    try:
        _check(path, os.lstat(path), False)
    except FileNotFoundError:
        return


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file.

    Raises:
        InputError: it is none, or it is to be written and has a second name.
        OSError: as the system says.
    """
    check_regular(path)  # opening a device or a pipe can have effects of its own
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        _check(path, os.fstat(handle), flags & os.O_ACCMODE != os.O_RDONLY)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check(path: Path, found: os.stat_result, writes: bool) -> None:
    what = _KINDS.get(stat.S_IFMT(found.st_mode))
    if what is None and writes and found.st_nlink > 1:
        what = "one file with another (a hard link)"
    if what is not None:
        raise InputError(
            f"run_dir {path.parent} holds {shown(path.name)}, which is {what}; valid: a folder of a "
            f"run's own files, regular ones"
        )


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises: as :func:`open_regular`.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write_all(handle: int, data: bytes) -> None:
    """Write bytes to a descriptor, however many the system takes at a time.

    Raises:
        OSError: as the system says (no space left).
    """
    at = 0
    while at < len(data):
        at += os.write(handle, data[at:])


def write_whole(path: Path, data: bytes) -> None:
    """Write a regular file whole or not at all: part file, sync, rename, sync of the folder.

    Raises:
        InputError: something else is there.
        OSError: as the system says.
    """
    check_regular(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)  # of a process that died, or a link
    try:
        with os.fdopen(open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as handle:
            handle.write(data)
            handle.flush()
            sync(handle.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable, where the system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)
