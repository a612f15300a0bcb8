"""What a pass costs, learnt from the times of the steps.

Costs are in *plain passes*: the time that a pass over one row of this sequence takes now. The unit
follows the machine's load and the context length, so the cost of a row, a head level or a drafter
keeps its meaning when these change. This module reads no clock: steps carry their own times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# Figures as in `control`: what other values of a constant do to tokens a unit of time.

# row counts with a cost of their own
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# cost of one more row, and of a level of heads, in plain passes, before any was timed: +.6, -.5%
# (half of it: -1.9 to +4.4% of single texts)
FIRST_COST = 0.1
FIRST = 3  # plain steps at the start; the fastest of them sets the unit: 1 +.1%, 6 -.3%
# log error of a time is clipped to this, since the machine may be busy for a moment: 0, +.6%
_OUTLIER = math.log(1.5)
_UNIT = 1 / 8  # smallest weight of a new time in the unit: -.3, +.1%
SMALLEST_WEIGHT = 1 / 32  # the same in a ratio, and in a mode's running means: -.3, +.5%
# weight, in the unit, of the second plain step in a row: -.2, -.1%; such steps brought chat of the
# default model from .95 to .97 of plain
_ANCHOR = 1 / 3


def dense_cost(rows: float) -> float:
    """Cost of a pass over so many rows before any was timed, where each reads all weights."""
    return 1.0 + FIRST_COST * (rows - 1)


def first_costs(bytes_read: Callable[[float], float]) -> Callable[[float], float]:
    """The cost of a pass by its number of rows before any was timed: rows of a mixture of experts
    have each their own experts, whose weights have to be read.

    Args:
        bytes_read: bytes of weights that a pass reads, by its number of rows.
    """
    one_row = max(1.0, bytes_read(1))

    def cost(rows: float) -> float:
        return dense_cost(rows) + bytes_read(rows) / one_row - 1.0

    return cost


class Costs:
    """Cost of a pass by its number of rows, in plain passes, and the milliseconds of a plain pass.

    Args:
        ratios: cost at each of :data:`KNOTS` as learnt so far, 0 where unknown; updated in place.
        first_cost: cost of a pass by its number of rows before any was timed.

    Attributes:
        unit: milliseconds of a plain pass; 0 before the first step.
    """

    def __init__(
        self,
        ratios: list[float] | None = None,
        first_cost: Callable[[float], float] = dense_cost,
    ) -> None:
        self.ratios = [0.0] * len(KNOTS) if ratios is None else ratios
        self._first_cost = first_cost
        self.unit = 0.0
        self._seen = [0] * len(KNOTS)
        self._plain = 0  # plain steps in a row

    def verify(self, rows: float) -> float:
        """Cost of a verify pass over ``rows`` rows, the choice of tokens included: interpolated
        between known row counts, extrapolated beyond the last with the mean slope up to it."""
        if not any(self.ratios[1:]):
            return self._first_cost(rows)
        low = 1
        low_cost = 1.0
        slope = FIRST_COST
        for knot, ratio in zip(KNOTS, self.ratios, strict=True):
            if not ratio or knot == 1:
                continue
            slope = (ratio - low_cost) / (knot - low)
            if knot >= rows:
                return low_cost + slope * (rows - low)
            low = knot
            low_cost = ratio
            slope = (ratio - 1) / (knot - 1)
        return low_cost + slope * (rows - low)

    def observe(self, rows: int, milliseconds: float) -> None:
        """Learn from the time of a verify pass, whose error is shared between unit and ratio.

        A drafted step shows only unit × ratio. The first plain step after one is slow, because
        drafting has filled the processor's caches; it is ignored, and the second one corrects the
        unit.
        """
        knot = next((i for i, size in enumerate(KNOTS) if size >= rows), 0)
        is_plain = knot == 0  # rows beyond all knots are learnt from as one row is
        self._seen[knot] += 1
        self._plain = self._plain + 1 if is_plain else 0
        if not self.unit or (is_plain and self._seen[0] <= FIRST):
            unit = milliseconds / self.verify(rows)  # the machine may be slow at first
            self.unit = min(unit, self.unit or unit)
            return
        error = math.log(max(milliseconds, 1e-9) / (self.unit * self.verify(rows)))
        error = min(_OUTLIER, max(-_OUTLIER, error))
        if self._plain == 1:
            return
        if self._plain == 2:
            self._correct_unit(math.exp(_ANCHOR * error))
        elif is_plain:
            self.unit *= math.exp(_UNIT * error)
        else:
            self._share_error(knot, error)

    def _correct_unit(self, change: float) -> None:
        """Multiply the unit, while milliseconds of passes over more rows stay as they are."""
        self.unit *= change
        self.ratios[:] = [ratio and max(1.0, ratio / change) for ratio in self.ratios]

    def _share_error(self, knot: int, error: float) -> None:
        """Learn from the log error of a drafted step at a knot: in part its ratio, in part the
        unit."""
        share = max(SMALLEST_WEIGHT, 1 / (1 + self._seen[knot]))
        before = self.ratios[knot] or self.verify(KNOTS[knot])
        ratio = max(1.0, before * math.exp(share * error))
        # fewer rows cost no more, or they are never tried again
        self.ratios[:knot] = [min(fewer, ratio) for fewer in self.ratios[:knot]]
        self.ratios[knot] = ratio
        self.unit *= math.exp(_UNIT * (1 - share) * error)


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What a drafter expects of its steps before it has made any; times are in plain passes.

    Attributes:
        words: what it does, for the summary ("heads from the verified state").
        tokens: tokens per step, the target's own included.
        rows: rows of a step's verify pass.
        draft_cost: time that drafting takes in a step.
        pass_cost: time of one draft pass, where a drafter makes one after another; 0 for others.
        best_chance: chance of the best candidate of such a pass; 0 for others.
        min_cached: it drafts only while at least so many tokens are cached.
        loads: it must fill a cache first, so it is tried only where many tokens are still to come.
    """

    words: str
    tokens: float
    rows: int
    draft_cost: float
    pass_cost: float = 0.0
    best_chance: float = 0.0
    min_cached: int = 0
    loads: bool = False
