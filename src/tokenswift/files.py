"""Reading small files of ours, and writing a file whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def is_address(name: object) -> bool:
    """Whether a name is an address of fsspec, such as ``s3://bucket/texts``, and no path."""
    return isinstance(name, str) and "://" in name


def read_small(path: Path, most: int = 1 << 20) -> bytes:
    """The content of a regular file of at most ``most`` bytes; never waits, whatever is there.

    Raises:
        OSError: it is not there, cannot be read, is no regular file, or is larger.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, "it is too large", str(path))
        return file.read(most)


def sync(handle: int) -> None:
    """Wait until what was written to a file, or the names in a folder, outlast a power cut.

    On a Mac fsync stops at the disk's own memory; where the file system knows of more, it is asked for that.

    Raises:
        OSError: as the system says.
    """
    if sys.platform == "darwin":
        with suppress(OSError):  # a share, or a folder: what fsync does is all there is
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to; it takes ``path``'s place when the block ends well.

    A failure leaves ``path`` as it was and no part behind. The folder is made; the file is readable by
    everybody (safetensors' own files are not). A link stays: what it leads to is replaced. The part has a
    name of its own: two processes that write the same file do not meet, and no link that lies there is used.

    Raises:
        OSError: the folder cannot be made, or the file not renamed, or ``path`` is no regular file.
    """
    path = replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(".part", f"{path.name}.", path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def replaceable(path: Path) -> Path:
    """What a path leads to, if a rename may take its place.

    Raises:
        OSError: a folder, a device or a pipe is there.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path
