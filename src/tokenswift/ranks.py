"""Processes that compute one model together (tensor parallelism), as ``torchrun`` starts them.

Each of them, a *rank*, holds a part of every layer and runs the whole of the decode loop: the same drafts,
the same noise, the same choices, so no token is ever sent. What could part them is compared
(:meth:`Ranks.agree`), and what only a clock or a disk can tell is the first rank's word
(:meth:`Ranks.shared`, :meth:`Ranks.first`). The first rank alone writes text, journal and progress.
"""

from __future__ import annotations

import hashlib
import os
import signal
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, perf_counter, sleep
from typing import Any, TypeVar

from tokenswift.types import InputError, RunError

T = TypeVar("T")
WAIT = timedelta(seconds=3)  # for the first rank's last line
STUCK = timedelta(minutes=10)  # a rank that answers no more
LOST = "another rank is gone"
#: words of gloo's and NCCL's errors when a rank is gone
GONE = ("gloo", "Connection closed", "Connection reset", "NCCL", "Broken pipe", "recvFromPeer")


def own_rank() -> int:
    """The rank of this process, 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def check_tp(tp: int) -> int:
    """See that this is one of ``tp`` processes.

    Raises:
        InputError: it is not.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if tp == count:
        return tp
    how = f"torchrun --nproc-per-node {tp} -m tokenswift …"
    if count == 1:
        raise InputError(f"tp is {tp}, but torchrun did not start this process; valid: 1, or {how}")
    raise InputError(f"tp is {tp}, but torchrun started {count} processes; valid: {count}")


class Ranks:
    """The processes of a model, this one among them; made in each.

    Args:
        size: how many there are.
        device: what they compute on, "cpu" or "cuda".

    Attributes:
        rank: this one's number.
    Raises:
        InputError: torchrun did not start so many.
        RunError: they do not reach each other.
    """

    def __init__(self, size: int, device: str) -> None:
        from torch import distributed

        self.size, self.rank = check_tp(size), own_rank()
        if not distributed.is_initialized():
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            try:
                distributed.init_process_group(backend, timeout=STUCK)
            except (ValueError, RuntimeError) as error:
                raise RunError(f"the {size} ranks do not reach each other ({_line(error)})") from error

    def shared(self, value: T) -> T:
        """The first rank's value, which can be pickled."""
        from torch import distributed

        held = [value]
        distributed.broadcast_object_list(held, src=0)
        return held[0]

    def first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives the first rank, where alone it is called.

        Raises:
            InputError, RunError: as there, on every rank.
        """
        made: Any = None
        if self.rank == 0:
            try:
                made = make()
            except (InputError, RunError) as error:
                made = error
        made = self.shared(made)
        if isinstance(made, InputError | RunError):
            raise made
        return made

    def clock(self) -> float:
        """Seconds by the first rank's clock: what is decided by them is decided alike."""
        return self.shared(perf_counter())

    def agree(self, what: str, numbers: Sequence[int]) -> None:
        """See that all ranks hold the same; the cost is that of one number sent.

        Raises:
            RunError: they do not.
        """
        import torch
        from torch import distributed

        digest = hashlib.sha256(array("q", numbers).tobytes()).digest()
        own = int.from_bytes(digest[:7], "little")
        ends = torch.tensor([own, -own])
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        if int(ends[0]) != -int(ends[1]):
            raise RunError(f"the ranks of the model do not agree on {what}")

    def explained(self, error: Exception) -> Exception:
        """An error of a pass: in one line where another rank is to blame, otherwise as it is."""
        if isinstance(error, RuntimeError) and any(word in str(error) for word in GONE):
            return RunError(_reason() or LOST)
        return error


def says(message: str) -> bool:
    """Whether this rank says why the run ended: the first one does, and another where the first is gone.

    ``message``: what it would say.
    """
    if own_rank() == 0:
        with suppress(Exception):  # nobody is there to hear it
            _store().set("said", "1")
        return True
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which ends who is left
    try:
        store = _store()
        if LOST not in message:
            store.set("why", f"rank {own_rank()}: {message}")
        end = monotonic() + WAIT.total_seconds()
        while not store.check(["said"]):
            if monotonic() > end:
                return True
            sleep(0.05)
        return False
    except Exception:  # the store is gone with its rank
        return True


def _reason() -> str:
    """What a rank that ended said of it; "" where it said nothing."""
    with suppress(Exception):  # the store is gone with its rank
        store = _store()
        if store.check(["why"]):
            return store.get("why").decode()
    return ""


def _store() -> Any:
    """What torchrun keeps for its processes, under names of this library."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    from torch import distributed

    made = distributed.TCPStore(address, port, timeout=WAIT)  # pyright: ignore[reportPrivateImportUsage]
    return distributed.PrefixStore("tokenswift", made)  # pyright: ignore[reportPrivateImportUsage]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
