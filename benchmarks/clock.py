"""The clock of measurements that are no generation."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median as middle
from time import perf_counter
from typing import Any

import torch


def times(work: Callable[[], object], runs: int = 5, least: float = 0.0) -> list[float]:
    """Milliseconds of each call after a first one, work on an accelerator included: at least ``runs``, until
    ``least`` seconds are over."""
    found: list[float] = []
    end = perf_counter() + least
    while len(found) <= runs or perf_counter() < end:
        begun = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(1e3 * (perf_counter() - begun))
    return found[1:]


def median(values: list[float]) -> float:
    """The median, rounded to four digits."""
    return round(middle(values), 4)


def pass_times(target: Any, context: int, rows: int, runs: int) -> list[float]:
    """Milliseconds of a pass of some rows (a chain of drafts) with its logits, behind a context.

    Args:
        target: a loaded model (`models.target.Target`).
    """
    cache = target.new_cache(context + rows)
    cache.fill_random(context)  # what keys hold costs nothing
    tokens = torch.arange(rows, device=target.device) % target.vocab_size
    positions = torch.arange(context, context + rows, device=target.device)
    parents = None if rows == 1 else list(range(-1, rows - 1))
    return times(lambda: target.logits(target.forward(tokens, positions, cache, parents).hidden), runs)
