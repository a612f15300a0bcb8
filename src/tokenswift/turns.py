"""Comparing speeds on one machine: whoever is compared takes turns, forth and back, so that neither
is always first and whatever slows the machine down slows all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tokenswift.types import Step

Side = TypeVar("Side")
Round = TypeVar("Round")


def take_turns(sides: Sequence[Side], rounds: Iterable[Round]) -> Iterator[tuple[Round, Side]]:
    """Each round with each side: in the order given in the first round, in the opposite order in
    the next, and so on."""
    order = list(sides)
    for current_round in rounds:
        for side in order:
            yield current_round, side
        order.reverse()


class DecodingSide:
    """A way of decoding that takes turns with another, a few tokens at a time.

    Times are those that steps know of themselves; what stands between two turns is not in them.

    Args:
        steps: the text's steps, such as a `Stream`.

    Attributes:
        tokens: the new tokens so far.
        step_count: steps so far.
        seconds: of all steps so far.
        phase_seconds: the same by phase of the loop.
        token_sources: new tokens by source, see :data:`tokenswift.types.SOURCES`.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        self.steps = steps
        self.tokens: list[int] = []
        self.step_count = 0
        self.seconds = 0.0
        self.phase_seconds: dict[str, float] = {}
        self.token_sources: Counter[str] = Counter()

    def run_to(self, length: int) -> None:
        """Decode until there are that many tokens, or the text has ended."""
        while len(self.tokens) < length:
            step = next(self.steps, None)
            if step is None:
                return
            self.add(step)

    def add(self, step: Step) -> None:
        """Count a step."""
        self.tokens += step.token_ids
        self.step_count += 1
        self.seconds += step.seconds
        self.token_sources.update(step.sources)
        for phase, seconds in step.times.items():
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds
