"""The work folder of a training: whose it is, who writes in it now, and the disk that it will take.

==================== ============================================================
``lock``             held by the training that runs; the system lets go of it
``states/``          hidden states of texts, and ``made_from``: a digest of what they depend on
``training``         a digest of the states and of what else the outcome depends on
``start.safetensors`` the weights that training starts from
``checkpoint.pt``    the training so far
==================== ============================================================

Only a training that has something to resume owns its folder: one that bad data ended leaves
nothing, and one that was killed before its first text leaves a folder that any command may take.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tokenswift.files import replacing
from tokenswift.types import InputError

LOCK = "lock"
#: bytes a weight of a drafter: float32 at its start, with two moments in a checkpoint and in the
#: one that replaces it, and in the outcome
WEIGHT_BYTES = 4 + 2 * 12 + 4


class BadData(InputError):
    """The data cannot be learnt from; states made of it are of no use."""


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Have a work folder for one training alone. It is made, and goes again if nothing is in it in
    the end.

    Raises:
        InputError: another training is at work there.
        OSError: as the system says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(
            f"work folder {folder} is in use by another training; valid: another --work folder, "
            "or wait for its end"
        ) from error
    try:
        yield
    finally:
        lock.release()
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
        with suppress(OSError):  # there is more in it
            folder.rmdir()


def check_claim(path: Path, key: str, way_out: str = "") -> None:
    """See that a work folder is a training's own, or nobody's.

    Args:
        path: file that holds the key of the training that it belongs to.
        way_out: what else than another folder is valid, for the message.
    Raises:
        InputError: it is another's.
    """
    stored = path.read_text(encoding="utf-8", errors="replace") if path.exists() else key
    if stored != key or (path.parent / "index.json").exists():  # which earlier versions wrote
        other = f"{path.parent} belongs to a training of other data or options"
        raise InputError(f"work folder {other}; name another --work folder{way_out}")


def claim(path: Path, key: str) -> None:
    """Take a work folder for a training by a file that holds its key.

    Raises:
        InputError: it is another's.
    """
    check_claim(path, key)
    with replacing(path) as part:
        part.write_text(key, encoding="utf-8")


def check_disk(folder: Path, tokens: int, width: int, weights: int) -> None:
    """See that a disk has room for what a training will write.

    Args:
        folder: the work folder; it need not be there yet.
        tokens: how many tokens' states are still to be written.
        width: numbers of a token's states, each of 2 bytes; its id takes 4.
        weights: how many the drafter has.
    Raises:
        InputError: naming what is needed and what is free.
    """
    needed = tokens * (2 * width + 4) + weights * WEIGHT_BYTES
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise InputError(
            f"work folder {folder} needs {needed:,} bytes for hidden states and checkpoints, its "
            f"disk has {free:,} free; valid: a --work folder on another disk, or fewer --tokens"
        )
