"""Files: small ones read within bounds, JSON of checkpoints among them (they come from anybody),
and a file replaced by a complete one or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenswift.checks import depth_and_size, shown
from tokenswift.types import InputError

# bytes: more than any model's files have
MOST_CONFIG = 1 << 24
MOST_TOKENIZER = 1 << 26
MOST_INDEX = 1 << 26  # of the index of weights
MOST_DEPTH = 64  # objects and lists in each other
MOST_FIELDS = 4096  # of the outermost object


def read_small(path: Path, most: int = 1 << 20) -> bytes:
    """The content of a regular file of at most ``most`` bytes; never waits, whatever is there.

    Raises:
        OSError: it is not there, cannot be read, is no regular file, or is larger.
    """
    # a pipe would wait for its writer
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, "it is too large", str(path))
        return file.read(most)


def sync(handle: int) -> None:
    """Wait until what was written to a file, or the names in a folder, outlast a power cut.

    On a Mac fsync stops at the disk's own memory; where the file system knows of more, it is asked
    for that.

    Raises:
        OSError: as the system says.
    """
    if sys.platform == "darwin":
        with suppress(OSError):  # a share, or a folder: what fsync does is all there is
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def sync_path(path: Path) -> None:
    """:func:`sync` a file or a folder that is not open.

    Raises:
        OSError: as the system says.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to; it takes ``path``'s place when the block ends well.

    What was written is on the disk before the name is, so that a power cut leaves the old file or
    the new one; and the name lasts where the system can sync a folder.

    A failure leaves ``path`` as it was and no part behind. The folder is made; who may read the
    file is as of any new one (safetensors' own are their user's alone). A link stays: what it leads
    to is replaced. The part has a name of its own: two processes that write the same file do not
    meet, and no link that lies there is used.

    Raises:
        OSError: the folder cannot be made, or the file not synced or renamed, or ``path`` is no
            regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield part
        sync_path(part)
        part.chmod(mode)
        os.replace(part, path)
        with suppress(OSError):  # some file systems sync no folder
            sync_path(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def object_in(path: Path, most: int, where: str) -> dict[str, Any]:
    """The object that a file holds.

    Args:
        most: bytes.
        where: whose the file is, for messages.
    Raises:
        InputError: it is no regular file, is larger, or is anything else than a JSON object in
            UTF-8.
    """
    try:
        value = json.loads(read_small(path, most).decode())
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
        if len(value) > MOST_FIELDS:
            raise ValueError(f"it has {len(value):,} fields, at most {MOST_FIELDS:,} are valid")
        if depth_and_size(value, MOST_DEPTH)[0] > MOST_DEPTH:
            raise ValueError(f"it has objects or lists more than {MOST_DEPTH} deep")
    except FileNotFoundError as error:
        line = f"{where} has no {path.name}; valid: a folder with one, or with a GGUF file"
        raise InputError(line) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: its {path.name} cannot be used ({line_of(error)}); valid: a JSON object of "
            f"up to {most >> 20} MB"
        ) from error
    return value


def weight_map(index: Path, where: str) -> dict[str, str]:
    """The files of a sharded checkpoint by the names of their tensors.

    Args:
        index: file that says so.
        where: whose it is, for messages.
    Raises:
        InputError: it cannot be read, is empty, or names anything but such files of its own folder.
    """
    files = object_in(index, MOST_INDEX, where).get("weight_map")
    if not isinstance(files, dict) or not files:
        line = f"{where}: weight_map of {index.name} is {shown(files)}"
        raise InputError(f"{line}; valid: files of tensors by name")
    file_name = re.compile(r"[\w.-]{1,243}\.safetensors", re.ASCII)
    for name in files.values():
        if not isinstance(name, str) or file_name.fullmatch(name) is None:
            line = f"{where}: {index.name} names the file {shown(name)}"
            raise InputError(f"{line}; valid: safetensors files of the folder")
    return files


def line_of(error: BaseException) -> str:
    """The message of an error, as a piece of a line."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return " ".join((text or str(error)).split())[:160] or type(error).__name__
