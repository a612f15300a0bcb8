"""Several processes (``torchrun``): who writes files, who waits, and on which device each one works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from tokenswift.types import InputError


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def first_process() -> bool:
    """True in the process that writes the files (rank 0)."""
    return int(os.environ.get("RANK", "0")) == 0


def local_device(place: str) -> str:
    """The device of this process: "cuda" becomes the one of its local rank.

    Args:
        place: from `loader.load.check_place`.
    Raises:
        InputError: fewer devices than processes on this machine, or one device named for several processes.
    """
    if not place.startswith("cuda") or world_size() == 1:
        return place
    import torch

    if place != "cuda":
        raise InputError(
            f"device is {place!r} for {world_size()} processes; valid: cuda, each takes its own, or cpu"
        )
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count:
        raise InputError(
            f"device is {place!r} with local rank {rank}, but there are {count}; start {count} processes"
        )
    return f"cuda:{rank}"


def once(done: Callable[[], bool], make: Callable[[], None]) -> None:
    """Run ``make`` in the first process unless its outcome is there; the others wait for the outcome.

    Args:
        done: whether the outcome, whole, lies in the work folder.
    """
    if first_process():
        if not done():
            make()
        return
    while not done():
        time.sleep(0.2)
