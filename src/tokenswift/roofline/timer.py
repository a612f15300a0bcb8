"""The clock of all measurements that are no generation: repeated calls, milliseconds each."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median as middle
from time import perf_counter

import torch


def times(work: Callable[[], object], runs: int = 5, least: float = 0.0) -> list[float]:
    """Milliseconds of each call after a first one: at least ``runs``, until ``least`` seconds are over."""
    work()
    found: list[float] = []
    end = perf_counter() + least
    while len(found) < runs or perf_counter() < end:
        found.append(once(work))
    return found


def once(work: Callable[[], object]) -> float:
    """Milliseconds of one call, work on an accelerator included."""
    begun = perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (perf_counter() - begun)


def median(values: list[float]) -> float:
    """The median, rounded to four digits."""
    return round(middle(values), 4)
