"""What drafts: the protocol by which strategies know their sources, and what it says and hears.

A drafter of another package is one class: a ``mark``, a constructor that takes a :class:`Setting`, and the
methods of :class:`Drafter`; an entry point of the group ``tokenswift.drafters`` makes it known (see
docs/drafting.md). It proposes; whether what it proposes is drafted follows from widths, or from chances and
prices, and no token can depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.ranking import Ranked
from tokenswift.spec.control import CostEstimate, Costs
from tokenswift.spec.drafters.candidates import Candidates, Source
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import DraftSource, DraftTree

__all__ = [
    "Candidates",
    "Costs",
    "CostEstimate",
    "Drafter",
    "DraftSource",
    "Need",
    "Outcome",
    "Ranked",
    "Setting",
    "Source",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was verified.

    Attributes:
        tokens: its new tokens, which end the text.
        nodes: how many tokens it committed to the cache.
        times: seconds of the step by phase, as far as it has come (see `types.Step`).
        in_use: whether this drafter drafts now, drafted last or is on trial.
        tree: what was verified; ``sequence.newest`` is the pass over it.
    """

    tokens: list[int]
    nodes: int
    times: Mapping[str, float]
    in_use: bool
    tree: DraftTree | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drafter is made with.

    Attributes:
        model: the target.
        sampler: its choice rule.
        coupled: whether candidates are ranked with the target's noise.
    """

    model: BaseTarget
    sampler: Sampler
    coupled: bool


class Drafter(Protocol):
    """One source of drafts in one run.

    Attributes:
        name: of its steps in figures and explanations; ``mark.name`` where it is the only drafter with it.
        refusals: counts its rows of logits that no token can be chosen from; after a few it is left out.
    """

    name: str

    @property
    def refusals(self) -> Source: ...

    @property
    def mark(self) -> DraftSource:
        """Name, letter and colours of its tokens."""
        ...

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory that it will hold in a run of up to ``text`` tokens, and that nodes beside the tree's take;
        ``row``: bytes of one node."""
        ...

    def begin(self, sequence: TokenSequence) -> None:
        """The prompt is there."""
        ...

    def offer(self, costs: Costs) -> CostEstimate | None:
        """What it expects, once after :meth:`begin`; None where it has no part in adaptive drafting. By
        ``costs`` a pass over n rows takes ``costs.verify(n)`` plain passes."""
        ...

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """Add candidates for the tokens that may follow ``sequence.tokens``, each with a chance."""
        ...

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """A step was verified, whoever drafted it; ``sequence`` holds its tokens."""
        ...
