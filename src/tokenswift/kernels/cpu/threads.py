"""How many threads a pass gets: what the machine has, and fewer while a further one gains nothing."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections import defaultdict, deque
from pathlib import Path
from statistics import median

#: share of a pass that may go by in waiting for other threads before fewer are tried
PATIENCE = 0.2
RECENT = 6  # passes of one size that a judgement rests on, of each number of threads
MOST_TRIALS = 64  # passes of a comparison
WORTH = 0.97  # a pass with more threads takes at most this share of the time, or they are not taken
HOLD, LONGEST = 32, 2048  # passes from one comparison to the next: after a change, at most


def usable() -> int:
    """Processors that this process may use: its affinity and its control group's quota, at least 1; on a Mac
    those of its fast kind, as a stage of a pass takes as long as its slowest thread."""
    if sys.platform == "darwin":
        return performance_cores() or os.cpu_count() or 1
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # no such call on this system
        count = os.cpu_count() or 1
    return max(1, math.ceil(min(count, quota())))


def performance_cores() -> int | None:
    """Cores of the fast kind, as macOS counts them; None where it does not tell (Macs with one kind)."""
    found = ctypes.c_int32(0)
    size = ctypes.c_size_t(ctypes.sizeof(found))
    ask = ctypes.CDLL(None).sysctlbyname
    ask.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
    failed = ask(b"hw.perflevel0.physicalcpu", ctypes.byref(found), ctypes.byref(size), None, 0)
    return None if failed or found.value < 1 else found.value


def quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Processors' worth of time that the control group allows; infinity where nothing is set.

    Args:
        root, own: where the system tells it (cgroup versions 2 and 1).
    """
    try:
        groups = [line.split(":", 2)[2] for line in own.read_text(encoding="ascii").splitlines()]
    except (OSError, IndexError, UnicodeDecodeError):
        groups = []
    least = math.inf
    for group in {"/", *groups}:
        path = group.strip("/")
        while True:  # a limit of a group above holds as well
            for folder in (root / path, root / "cpu" / path):
                least = min(least, _limit(folder))
            if not path:
                break
            path = path.rpartition("/")[0]
    return least


def _limit(folder: Path) -> float:
    """Of one control group."""
    try:
        allowed, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            allowed = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return math.inf
    try:
        share = int(allowed) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf
    return share if share > 0 else math.inf


class Threads:
    """Chooses the number of threads of each pass, by what passes took.

    On a machine whose processors are wanted by others, a thread of ours that is put aside holds up the rest.
    Where the calling thread has waited for others during more than :data:`PATIENCE` of its recent passes,
    passes by all and by half as many threads take turns, and the faster way is kept: for a while, then they
    are compared again. An idle machine makes no trials. The bits of a pass do not depend on any of this.
    """

    def __init__(self) -> None:
        self._halved = 0  # how often the number is halved
        self._rival: int | None = None  # another such number, compared with it now
        self._turn = False  # whether the rival has the next pass
        self._hold, self._rest = HOLD, 0  # passes until the next comparison may begin: after one, left now
        self._trial = 0  # passes of the comparison so far
        self._seconds: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._waits: deque[float] = deque(maxlen=RECENT)

    def count(self, limit: int) -> int:
        """Threads for the next pass, from 1 to ``limit``."""
        return max(1, limit >> self._way)

    @property
    def _way(self) -> int:
        return self._halved if self._rival is None or not self._turn else self._rival

    def observe(self, rows: int, limit: int, threads: int, seconds: float, waited: float) -> None:
        """Learn from a pass.

        Args:
            rows: of the pass: times are compared among passes of equal size.
            limit, threads: what :meth:`count` was asked, and what the pass had.
            seconds, waited: what it took, and how much of that the calling thread waited for others.
        """
        if limit < 2 or threads != self.count(limit):
            return  # another pass had the team, or the limit is another one now
        if self._rival is not None:
            self._seconds[rows, self._way].append(seconds)
            self._turn = not self._turn
            self._trial += 1
            self._judge(rows)
            return
        self._waits.append(waited / seconds if seconds > 0 else 0.0)
        self._rest -= 1
        if self._rest > 0:
            return
        impatient = len(self._waits) == RECENT and median(self._waits) > PATIENCE
        if impatient and limit >> (self._halved + 1):
            self._compare(self._halved + 1)
        elif self._halved:
            self._compare(self._halved - 1)

    def _compare(self, rival: int) -> None:
        self._rival, self._turn, self._trial = rival, True, 0
        self._seconds.clear()  # on a busy machine earlier times were other times

    def _judge(self, rows: int) -> None:
        """End the comparison once there are enough passes of one size by both ways."""
        rival = self._halved if self._rival is None else self._rival
        now, other = self._seconds[rows, self._halved], self._seconds[rows, rival]
        if min(len(now), len(other)) < RECENT and self._trial < MOST_TRIALS:
            return
        enough = min(len(now), len(other)) == RECENT
        gain = WORTH if rival < self._halved else 1.0  # a further thread has to gain something
        if enough and median(other) <= median(now) * gain:
            self._halved, self._hold = rival, HOLD
        else:
            self._hold = min(2 * self._hold, LONGEST)
        self._rival, self._rest = None, self._hold
        self._waits.clear()
