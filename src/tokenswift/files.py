"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to; it takes ``path``'s place when the block ends well.

    A failure leaves ``path`` as it was and no part behind. The folder is made; the file is readable by
    everybody (safetensors' own files are not).

    Raises:
        OSError: the folder cannot be made, or the file not renamed.
    """
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
