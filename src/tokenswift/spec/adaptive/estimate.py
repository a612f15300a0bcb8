"""What a drafter says of itself before a run, and what it hears after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What a drafter expects of its steps, before there were any.

    Attributes:
        words: what it does, for the summary ("heads from the verified state").
        title: what it is, in words that begin with "the" ("the heads").
        tokens: yield of a step, the target's own token included.
        rows: of a step's verify pass.
        price: milliseconds that drafting takes in a step; 0: it drafts in every step beside the others.
        pass_ms, lead: of a drafter that makes one pass after another: milliseconds of one, and the chance of
            its best candidate; 0 for others.
        least: it drafts only over more cached tokens than these.
        loads: it has to load a cache first, so it is tried seldom, and only where what is left of the text
            promises to repay that.
        given: the user asked for it, so the summary says when it did not pay.
        priors: weights that its chances start from, by kind of ranking (see `calibration`).
    """

    words: str
    title: str
    tokens: float
    rows: int
    price: float
    pass_ms: float = 0.0
    lead: float = 0.0
    least: int = 0
    loads: bool = False
    given: bool = False
    priors: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was verified.

    Attributes:
        tokens: its new tokens, which end the text.
        nodes: how many tokens it committed to the cache.
        times: seconds of the step by phase, as far as it has come (see `types.Step`).
        in_use: whether this drafter drafts now, drafted last or is on trial.
    """

    tokens: list[int]
    nodes: int
    times: Mapping[str, float]
    in_use: bool
