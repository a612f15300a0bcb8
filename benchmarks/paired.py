"""A paired run: a strategy beside plain decoding, from the same state, in turns of some tokens.

Both run in one process and take turns through the whole text, first one ahead, then the other, so that
whatever slows the machine down slows both. Times are those that steps know of themselves; nothing else is
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tokenswift.config import SamplingParams
from tokenswift.engine.prefill import Prefilled
from tokenswift.metrics import distinct
from tokenswift.types import Step

TURNS = 128  # at most about so many turns a run
LEAST = 16  # tokens of a turn
WARM = 8  # tokens before the clock runs: what is made at first use is there then
COLUMNS = ("tokens", "seconds", "steps", "drafted", "accepted", "ngram_accepted", "gamma")


class Side:
    """One of the two: its steps so far, added up at the end of each turn.

    Attributes:
        steps: where they come from.
        tokens: its new tokens.
        curve: at the end of each turn the sums so far, as :data:`COLUMNS` names them.
        phases: seconds by phase.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        self.steps = steps
        self._sums: list[float] = [0, 0.0, 0, 0, 0, 0, 0]
        self.tokens: list[int] = []
        self.curve: list[list[float]] = []
        self.phases: dict[str, float] = {}

    def run_to(self, tokens: int) -> None:
        """Decode until there are so many tokens."""
        while len(self.tokens) < tokens:
            step = next(self.steps)
            self.tokens += step.token_ids
            added = (
                len(step.token_ids),
                step.seconds,
                1,
                step.drafted,
                step.accepted,
                step.ngram_accepted,
                step.gamma,
            )
            self._sums = [a + b for a, b in zip(self._sums, added, strict=True)]
            for phase, seconds in step.times.items():
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.curve.append([round(value, 6) for value in self._sums])

    def at(self, point: int) -> dict[str, float]:
        """The sums at the end of the first turn that has so many tokens."""
        entry = next(entry for entry in self.curve if entry[0] >= point)
        return dict(zip(COLUMNS, entry, strict=True))


def paired_run(
    base: Prefilled,
    strategy: str,
    options: dict[str, Any],
    sampling: SamplingParams,
    points: list[int],
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[Side, Side]:
    """Decode plainly and by a strategy; (plain, the variant).

    Args:
        base: the state that both go on from.
        points: new tokens at which turns must end; the last is how many there are.
        on_progress: called with the share that is done, after each turn.
    """
    plain: tuple[str, dict[str, Any]] = ("autoregressive", {})
    for name, values in (plain, (strategy, options)):
        base.generate(WARM, name, values, sampling, ignore_eos=True)
    new = points[-1]
    sides = [
        Side(base.stream(new, name, values, sampling, ignore_eos=True))
        for name, values in (plain, (strategy, options))
    ]
    order = list(sides)
    for end in turns(points):
        for side in order:
            side.run_to(end)
        order.reverse()
        on_progress(end / new)
    return sides[0], sides[1]


def turns(points: list[int]) -> list[int]:
    """Where turns end: at every point, and often enough between them."""
    size = max(LEAST, -(-points[-1] // TURNS))
    return sorted({*range(size, points[-1], size), *points})


def figures(plain: Side, variant: Side, point: int) -> dict[str, Any]:
    """What tables show of a run's first so many new tokens (definitions: `metrics`)."""
    slow, fast = plain.at(point), variant.at(point)
    seconds = slow["seconds"] / slow["tokens"], fast["seconds"] / fast["tokens"]
    several = [distinct(variant.tokens[:point], n) for n in (1, 2, 3, 4)]
    made: dict[str, Any] = {
        "alpha": fast["accepted"] / fast["gamma"] if fast["gamma"] else 0.0,
        "beta": fast["ngram_accepted"] / fast["gamma"] if fast["gamma"] else 0.0,
        "length": fast["tokens"] / fast["steps"],
        "nodes": fast["drafted"] / fast["steps"],
        "speedup": seconds[0] / seconds[1],
        "plain_ms": 1000 * seconds[0],
        "ms": 1000 * seconds[1],
        "step_ms": 1000 * fast["seconds"] / fast["steps"],
        "price": fast["seconds"] / fast["steps"] / seconds[0],
        "plain_minutes": seconds[0] * point / 60,
        "minutes": seconds[1] * point / 60,
        **{f"d{n}": value for n, value in enumerate(several, 1)},
        "distinct": sum(several) / 4,
    }
    return {name: round(value, 6) for name, value in made.items()}
