"""What is known of each mode of adaptive drafting, and what is reported of them.

A *mode* is the name of the drafter in use, or *plain*; see `control`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from tokenswift.speculation.costs import (
    FIRST,
    SMALLEST_WEIGHT,
)

PLAIN = "plain"
# Each constant stands with what half of it and twice as much do to tokens a unit of time, as in
# `control`.
_BIAS_MEMORY = 64.0  # expected drafted tokens that a mode's bias is averaged over: -.1, -.1%
# the same before any was verified, so that heads that bring nothing are not believed for long: with
# 8, random tokens at T 1.5 in int8 came at .94 of plain decoding's speed instead of .97
_FIRST_BIAS_WEIGHT = 4.0
# expected drafted tokens at the first bias that are hoped for beside what was seen, before a trial:
# without them a drafter that was unlucky in its first 8 steps is never asked again. With what
# lookups learn of DRY: 1.60 instead of 1.49 times plain decoding's speed behind 4,096 tokens of a
# novel, 1.66 instead of 1.69 behind 2,500 (1.5B, 1,000 tokens)
_HOPE = 12.0
# steps of a mode up to which its trials stay close: 24 -.1% (-.3 where heads bring nothing)
_KNOWN = 16
_LEAST_BIAS = 0.3  # a guard: rates are divided by it
_MOST_BIAS = 1.3  # a guard: one lucky step is not believed for long
MOST_ERROR = 3.0  # a guard: how many times longer than expected drafting may seem to take
FIRST_WAIT = 16  # steps of the first pause, and between the first trials; then twice as many


@dataclass(slots=True)
class Mode:
    """Running means over a mode's steps, and its totals.

    Attributes:
        mean_tokens: mean of the tokens that a step is expected to yield.
        mean_rows: mean of the rows of a verify pass.
        draft_cost: mean of the drafting time of a step, in plain passes.
        pass_cost: time of one draft pass, in plain passes; 0 for modes without draft passes.
        next_trial: number of the step from which it may be tried.
        wait: steps from its next trial to the one after.
        steps: number of its steps.
        observed_steps: number of the steps in the means.
        total_tokens: tokens of all its steps.
        total_nodes: nodes below the root in all its steps.
        bias: accepted ÷ expected drafted tokens.
        bias_weight: expected drafted tokens that the bias is averaged over.
    """

    mean_tokens: float
    mean_rows: float
    draft_cost: float
    pass_cost: float = 0.0
    next_trial: int = FIRST + 1
    wait: int = FIRST_WAIT
    steps: int = 0
    observed_steps: int = 0
    total_tokens: int = 0
    total_nodes: int = 0
    bias: float = 1.0
    bias_weight: float = _FIRST_BIAS_WEIGHT

    def observe_draft(self, expected: float, rows: int) -> float:
        """Learn what a step would draft; returns the weight of that in the means."""
        weight = max(SMALLEST_WEIGHT, 1 / (self.observed_steps + 3))
        self.observed_steps += 1
        self.mean_tokens += weight * (expected - self.mean_tokens)
        self.mean_rows += weight * (rows - self.mean_rows)
        return weight

    def learn(self, expected: float, tokens: int, rows: int, draft_cost: float | None) -> None:
        """Learn from a step; ``draft_cost`` is its drafting time, None where it is not typical."""
        weight = self.observe_draft(expected, rows)
        if draft_cost is not None:
            most = MOST_ERROR * self.draft_cost + 0.1  # the machine was busy for a moment
            self.draft_cost += weight * (min(draft_cost, most) - self.draft_cost)
        self.update_bias(expected - 1, tokens - 1)

    @property
    def is_known(self) -> bool:
        """Whether it had enough steps to believe its bias."""
        return self.steps >= _KNOWN

    def hoped_bias(self, first: float) -> float:
        """The bias that a trial may show: near the first one while few tokens were verified."""
        return (self.bias * self.bias_weight + first * _HOPE) / (self.bias_weight + _HOPE)

    def update_bias(self, expected: float, accepted: int) -> None:
        """Learn the bias from a step's drafted tokens."""
        self.bias_weight = max(expected, min(_BIAS_MEMORY, self.bias_weight + expected))
        error = accepted - expected * self.bias
        bias = self.bias + error / self.bias_weight
        self.bias = min(_MOST_BIAS, max(_LEAST_BIAS, bias))


@dataclass(frozen=True, slots=True)
class Drafted:
    """How a step's tree was drafted.

    Attributes:
        mode: the mode of the step.
        expected: tokens that the step is expected to yield.
        rows: nodes, the root included.
        passes: draft passes made for it.
        levels: levels of heads run for it.
        loaded: a cache was filled meanwhile, so its drafting time is not typical.
    """

    mode: str = PLAIN
    expected: float = 1.0
    rows: int = 1
    passes: int = 0
    levels: int = 0
    loaded: bool = False


class ModeRecord(TypedDict):
    """A mode in a report: its steps, and the tokens and nodes below the root of all of them."""

    steps: int
    tokens: int
    nodes: int


class ControlRecord(TypedDict):
    """A report of adaptive drafting, for JSON.

    Attributes:
        summary: a sentence on what was used.
        gain: the speed-up over plain decoding at the measured time of a plain pass; None where too
            few of these were timed.
        modes: what each mode that was used came to.
    """

    summary: str
    gain: float | None
    modes: dict[str, ModeRecord]
