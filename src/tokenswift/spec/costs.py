"""What passes take, by rows: learnt from the times of steps, without any measuring beforehand."""

from __future__ import annotations

import math

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # row counts that are told apart
ROW = 0.1  # of a plain pass that a row takes, before any was seen
LEVEL = 0.1  # plain passes that a level of heads takes, before any was made
FIRST = 3  # plain steps at first, what the fastest takes is the unit
_OFF = math.log(1.5)  # a step counts as no further off than this: a hiccup of the machine
_UNIT, _RATIO = 1 / 8, 1 / 32  # least weights of a new figure


class Costs:
    """What passes take, in plain passes; from their times the unit too, in milliseconds.

    Args:
        ratios: of each of :data:`KNOTS` what was learnt before, 0 where nothing was; it learns on.

    Attributes:
        unit: milliseconds of a plain pass; 0 before the first step.
    """

    def __init__(self, ratios: list[float] | None = None) -> None:
        self.ratios = [0.0] * len(KNOTS) if ratios is None else ratios
        self.unit = 0.0
        self._seen = [0] * len(KNOTS)

    def verify(self, rows: float) -> float:
        """A pass over so many rows, with the choice of its tokens: between row counts that were seen by
        interpolation, beyond them as steep as up to the last one."""
        low, below, slope = 1.0, 1.0, ROW
        for knot, ratio in zip(KNOTS, self.ratios, strict=True):
            if not ratio or knot == 1:
                continue
            slope = (ratio - below) / (knot - low)
            if knot >= rows:
                return below + slope * (rows - low)
            low, below, slope = float(knot), ratio, (ratio - 1) / (knot - 1)
        return below + slope * (rows - low)

    def level(self) -> float:
        """A level of heads, before any was made."""
        return LEVEL

    def observe(self, rows: int, milliseconds: float) -> None:
        """Take in a verify pass: part of what it is off is the machine's speed, part the row count's."""
        at = next((at for at, knot in enumerate(KNOTS) if knot >= rows), 0)
        self._seen[at] += 1
        if not self.unit or (not at and self._seen[0] <= FIRST):  # the first ones may have been slow
            found = milliseconds / self.verify(rows)
            self.unit = min(found, self.unit or found)
            return
        error = math.log(max(milliseconds, 1e-9) / (self.unit * self.verify(rows)))
        error = min(_OFF, max(-_OFF, error))
        share = max(_RATIO, 1 / (1 + self._seen[at])) if at else 0.0
        if at:
            known = self.ratios[at] or self.verify(KNOTS[at])
            self.ratios[at] = max(1.0, known * math.exp(share * error))
        self.unit *= math.exp(_UNIT * (1 - share) * error)
