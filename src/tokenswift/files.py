"""Writing a file whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to; it takes ``path``'s place when the block ends well.

    A failure leaves ``path`` as it was and no part behind. The folder is made; the file is readable by
    everybody (safetensors' own files are not). A link stays: what it leads to is replaced.

    Raises:
        OSError: the folder cannot be made, or the file not renamed, or ``path`` is no regular file.
    """
    path = replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
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
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path
