"""What a pass costs, by rows and context: measured once per machine and model, corrected as a run goes on.

The time of a verify pass of n rows over L cached tokens is modelled as ``a_n + b_n · L``: weights,
arithmetic and overhead once, keys and values by the token. :func:`measure` finds both from passes over
two lengths, once; from then on the times of steps are the measurement. During a run :class:`Costs` compares
each step with its prediction: the median of the newest ratios scales all predictions (a busy machine, a
longer context), and a row count is corrected by the median of what its steps took beside the steps around
them, so neither single outliers nor a machine that is slow for a while make one count look dearer than
another. What a run has learnt corrects the table that the next one begins with (:meth:`Costs.learned`).

A table that was measured while others had the cores is in doubt: what it says of drafting is taken for less,
and some steps draft a little more than its prices allow, so that steps can show that it is wrong. Doubt fades
with the steps.
"""

from __future__ import annotations

import hashlib
import os
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import torch

from tokenswift.files import read_small, replacing
from tokenswift.models.base import BaseTarget
from tokenswift.spec.strategy import ALONE, BatchLoad

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHORT, LONG = 64, 2048  # cached tokens of the measured passes
SECONDS = 2.0  # that measuring may take, about
_RECENT = 15  # ratios that a median is taken of
_ENOUGH = 3  # steps of a row count that correct its price
_LEARNT = 32  # steps of a run that correct the table
_FADES = 64  # steps that halve the doubt in a table
_MOST_WAIT = 0.9  # share of the time spent waiting that is believed
BUSY = 0.1  # share of the measuring spent waiting for a core from which its figures are in doubt
#: writes tables: a folder on a network that does not answer keeps no text waiting
WRITER = ThreadPoolExecutor(1, "tokenswift-costs")
_Rows = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Least = Annotated[float, msgspec.Meta(ge=1e-6, le=1e7)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e7)]


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times in milliseconds.

    Attributes:
        rows: row counts that were measured, ascending; the first is 1.
        fixed: a_n of each: a pass over no cached tokens, LM head included.
        token: b_n of each: more for every cached token.
        level: one head's level for one row, its ranking included; 0 where there are no heads.
        waited: share of the measuring in which threads were ready to run and others had the cores, 0 to 1.

    Raises:
        ValueError: lists of different lengths or none, or row counts that do not rise from 1.
    """

    rows: tuple[_Rows, ...]
    fixed: tuple[_Least, ...]
    token: tuple[_Time, ...]
    level: _Time = 0.0
    waited: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        if not self.rows or not len(self.rows) == len(self.fixed) == len(self.token):
            raise ValueError("lists of different lengths, or empty ones")
        if self.rows[0] != 1 or any(low >= high for low, high in pairwise(self.rows)):
            raise ValueError("row counts that do not rise from 1")

    def verify(self, rows: int, context: int, beside: BatchLoad = ALONE) -> float:
        """Milliseconds of a pass of ``rows`` rows over ``context`` cached tokens, and of what it holds
        besides: products run over the rows of all texts, attention over each text's own keys."""
        more = self.token[0] * beside.context
        return self._of(self.fixed, rows + beside.rows) + self._of(self.token, rows) * context + more

    def _of(self, times: tuple[float, ...], rows: int) -> float:
        """One of the lists at a row count: between measured ones by interpolation, beyond in proportion."""
        at = bisect_left(self.rows, rows)
        if at == len(self.rows):
            return times[-1] * rows / self.rows[-1]
        if self.rows[at] == rows:
            return times[at]
        low, high = self.rows[at - 1], self.rows[at]
        return times[at - 1] + (rows - low) / (high - low) * (times[at] - times[at - 1])


@torch.inference_mode()
def measure(
    model: BaseTarget,
    level: Callable[[], object] | None = None,
    seconds: float = SECONDS,
) -> Table:
    """Time passes of the model over made-up keys; takes about ``seconds``. ``level``: makes one head's level.

    All row counts are timed in turn, at least three times over, and the least of each counts: what disturbs
    the machine for a moment makes none of them dearer than the others. Where passes take long, the larger
    row counts are left out.
    """
    begun, account = perf_counter(), _ran_and_waited()
    caches = {length: model.new_cache(length + ROWS[-1]) for length in (SHORT, LONG)}
    for length, cache in caches.items():
        cache.clear()
        cache.commit(tuple(range(length)))
    best: dict[tuple[int, int], float] = {}
    counts, sweeps = list(ROWS), 0
    levels: list[float] = []
    while sweeps < 3 or (sweeps < 8 and perf_counter() - begun < seconds):
        for count in counts:
            if not sweeps and best and perf_counter() - begun > seconds / 3:
                break
            for length, cache in caches.items():
                spent = _time(lambda n=count, c=cache: (_pass(model, c, n), model.backend.synchronize()))
                best[count, length] = min(spent, best.get((count, length), spent))
        if level is not None:
            levels.append(_time(level))
        counts, sweeps = [count for count in counts if (count, LONG) in best], sweeps + 1
    slopes = [max(0.0, (best[n, LONG] - best[n, SHORT]) / (LONG - SHORT)) for n in counts]
    fixed = [max(best[n, SHORT] - slope * SHORT, 1e-6) for n, slope in zip(counts, slopes, strict=True)]
    same = [1.0] * len(counts)
    fixed, slopes = _rising(fixed, same), _rising(slopes, same)
    level_ms = min(levels, default=0.0)
    return Table(tuple(counts), tuple(fixed), tuple(slopes), level_ms, _waited_since(account))


def _ran_and_waited() -> tuple[float, float] | None:
    """Seconds that threads of this process have run, and that they were ready to run while others had the
    cores, by the system's account; None where it keeps none."""
    ran = waited = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                found = Path("/proc/self/task", thread, "schedstat").read_text(encoding="ascii").split()
                ran, waited = ran + int(found[0]), waited + int(found[1])
    except (OSError, ValueError, IndexError):
        return None
    return (ran / 1e9, waited / 1e9) if ran else None


def _waited_since(before: tuple[float, float] | None) -> float:
    """The share of the time since then that threads waited for a core; without an account what the load of
    the last minute would make it."""
    now = _ran_and_waited()
    if before is None or now is None:
        try:
            load = os.getloadavg()[0]
        except OSError:
            return 0.0
        return max(0.0, 1 - (os.cpu_count() or 1) / load) if load > 0 else 0.0
    ran, waited = (max(0.0, after - then) for after, then in zip(now, before, strict=True))
    return waited / (ran + waited) if ran + waited > 0 else 0.0


def _pass(model: BaseTarget, cache: object, rows: int) -> None:
    tokens = torch.zeros(rows, dtype=torch.long)
    positions = torch.arange(rows) + cache.length  # type: ignore[attr-defined]
    parents = [-1, *([0] * (rows - 1))]
    model.logits(model.forward(tokens, positions, cache, parents).hidden)  # type: ignore[arg-type]


def _time(run: Callable[[], object]) -> float:
    """Milliseconds of a run."""
    begun = perf_counter()
    run()
    return 1000 * (perf_counter() - begun)


def kept_table(model: BaseTarget, folder: Path, make: Callable[[], Table], more: object = None) -> Table:
    """The table of this model, type, device and number of threads: the one in ``folder``, or one made now.

    ``more``: what else tells passes apart, such as products in int8. What cannot be one (a damaged file) is
    made again.
    """
    path = _place(model, folder, more)
    try:
        return msgspec.json.decode(read_small(path), type=Table)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        pass  # none yet, or damaged
    table = make()
    keep_table(model, folder, table, more)
    return table


def keep_table(model: BaseTarget, folder: Path, table: Table, more: object = None) -> None:
    """Have :data:`WRITER` keep a table in ``folder`` for :func:`kept_table`, in place of the one there."""
    WRITER.submit(_write, _place(model, folder, more), table)


def _write(path: Path, table: Table) -> None:
    with suppress(OSError), replacing(path) as part:  # else the next one is made anew
        part.write_bytes(msgspec.json.encode(table))


def _place(model: BaseTarget, folder: Path, more: object) -> Path:
    """The file of a model's table."""
    name = model.backend.processor()
    shape = (model.vocab_size, model.weight_bytes, model.kv_bytes, str(model.dtype), model.backend.name)
    threads = torch.get_num_threads()
    machine = (name, model.backend.key, threads, os.cpu_count(), torch.__version__)
    key = repr((shape, machine, ROWS, SHORT, LONG, more, 6))
    return folder / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"


class Costs:
    """Predicted milliseconds of one run's passes, corrected by what its steps took.

    Args:
        table: measured beforehand.

    Attributes:
        doubtful: whether it was measured on a busy machine.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.doubtful = table.waited > BUSY
        self.scale = self._typical = 1.0
        self._drafting = 1 - min(table.waited, _MOST_WAIT) if self.doubtful else 1.0
        self._all: deque[tuple[int, float]] = deque(maxlen=2 * _RECENT + 1)  # rows, time over prediction
        self._by_rows: dict[int, deque[float]] = {}
        self._factors: dict[int, float] = {}
        self._fresh = 0

    def verify(self, rows: int, context: int, beside: BatchLoad = ALONE) -> float:
        """A verify pass of ``rows`` nodes, with the choice of its tokens, and of what it holds besides."""
        factor = self._factors.get(rows + beside.rows, 1.0)
        return self.scale * factor * self.table.verify(rows, context, beside)

    def level(self) -> float:
        """One level of the heads; a tenth of a pass where none was measured."""
        return self._typical * self._drafting * self.table.level or 0.1 * self.verify(1, 0)

    def observe(self, rows: int, context: int, milliseconds: float, beside: BatchLoad = ALONE) -> None:
        """Take in one step's verify pass."""
        self._all.append((rows + beside.rows, milliseconds / self.table.verify(rows, context, beside)))
        self._fresh += 1
        full = len(self._all) == self._all.maxlen
        count, ratio = self._all[_RECENT if full else -1]  # with as many steps behind it as before
        scale = statistics.median([ratio / self._factors.get(n, 1.0) for n, ratio in self._all])
        self._by_rows.setdefault(count, deque(maxlen=_RECENT)).append(ratio / scale)
        if self._fresh % 8 == 0 or self._fresh == 4:
            self.scale = scale
            for count, ratios in self._by_rows.items():
                if len(ratios) >= _ENOUGH:
                    self._factors[count] = min(2.0, max(0.5, statistics.median(ratios)))
            # scale and factors may trade a part of each other: what most steps took over the table is both
            self._typical = scale * statistics.median([self._factors.get(n, 1.0) for n, _ in self._all])

    def learned(self) -> Table | None:
        """The table as the steps have corrected it, for the next run; None: too few steps.

        A row count that was not seen is corrected as those beside it. That all of them took longer than the
        table says is the machine's load, and not kept; that they were faster is.
        """
        if self._fresh < _LEARNT or not self._factors:
            return None
        table, faster = self.table, min(1.0, self._typical)
        factors = [faster * self.scale / self._typical * _between(self._factors, n) for n in table.rows]
        fixed, token = _rising(table.fixed, factors), _rising(table.token, factors)
        waited = table.waited * 0.5 ** (self._fresh / _FADES)
        less = self._drafting
        if self.doubtful and waited > BUSY:
            less /= 1 - min(waited, _MOST_WAIT)
        return replace(
            table,
            fixed=tuple(min(1e7, max(1e-6, value)) for value in fixed),
            token=tuple(min(1e7, value) for value in token),
            level=faster * less * table.level,
            waited=waited,
        )


def _between(seen: Mapping[int, float], rows: int) -> float:
    """What is known of the row counts around this one, in proportion to their distance."""
    if rows in seen:
        return seen[rows]
    counts = sorted(seen)
    at = bisect_left(counts, rows)
    if at in (0, len(counts)):
        return seen[counts[min(at, len(counts) - 1)]]
    low, high = counts[at - 1], counts[at]
    return seen[low] + (rows - low) / (high - low) * (seen[high] - seen[low])


def _rising(times: Sequence[float], factors: Sequence[float]) -> list[float]:
    """The times, corrected; a wider pass that is faster shows what a narrower one takes."""
    made = [time * factor for time, factor in zip(times, factors, strict=True)]
    for i in range(len(made) - 2, -1, -1):
        made[i] = min(made[i], made[i + 1])
    return made
