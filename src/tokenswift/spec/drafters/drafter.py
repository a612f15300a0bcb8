"""What drafts: the protocol by which strategies know their sources, and what it says and hears.

A drafter of another package is one class: a ``mark``, a constructor that takes a :class:`Setting`, and the
methods of :class:`Drafter`; an entry point of the group ``tokenswift.drafters`` makes it known (see
docs/drafting.md). It proposes; whether what it proposes is drafted follows from widths, or from chances and
prices, and no token can depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.ranking import Ranked
from tokenswift.spec.adaptive.cost import Costs
from tokenswift.spec.adaptive.estimate import CostEstimate, Outcome
from tokenswift.spec.drafters.candidates import Candidates
from tokenswift.spec.drafters.invalid_logits import Source
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import DraftSource

__all__ = [
    "Candidates",
    "Costs",
    "Drafter",
    "DraftSource",
    "Need",
    "CostEstimate",
    "Outcome",
    "Ranked",
    "Setting",
    "Source",
]


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
        """What it expects, once after :meth:`begin`; None where it has no part in adaptive drafting."""
        ...

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """Add candidates for the tokens that may follow ``sequence.tokens``, each with a chance."""
        ...

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """A step was verified, whoever drafted it; ``sequence`` holds its tokens."""
        ...
