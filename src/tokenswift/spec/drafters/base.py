"""What drafts: the class that all drafters are of, and whose tokens they are, by name and letter.

A drafter proposes; whether that is drafted follows from widths, or from chances and prices, and no token can
depend on it. Light: nothing is loaded here, since journals and reports ask for the marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenswift.types import DraftSource, DraftTree

if TYPE_CHECKING:
    from tokenswift.memory import Need
    from tokenswift.spec.control import CostEstimate, Costs
    from tokenswift.spec.drafters.candidates import Candidates, Source
    from tokenswift.spec.strategy import TokenSequence

TARGET = DraftSource("target", "t")
HEAD = DraftSource("head", "h")  # also the target's own passes
NGRAM = DraftSource("ngram", "n")
CHAIN = DraftSource("chain", "c")
GRAMMAR = DraftSource("grammar", "g")
EAGLE = DraftSource("eagle", "e")
RECYCLE = DraftSource("recycle", "r")
#: all sources of tokens by name
MARKS = {mark.name: mark for mark in (TARGET, HEAD, NGRAM, CHAIN, GRAMMAR, EAGLE, RECYCLE)}


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


class Drafter:
    """One source of drafts in one run.

    Attributes:
        name: of its steps in figures and explanations.
        mark: name, letter and colours of its tokens.
        refusals: counts its rows of logits that no token can be chosen from; after a few it is left out.
    """

    name: str
    mark: DraftSource
    refusals: Source

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory that it will hold in a run of up to ``text`` tokens, and that nodes beside the tree's take;
        ``row``: bytes of one node."""
        return []

    def begin(self, sequence: TokenSequence) -> None:
        """The prompt is there."""

    def offer(self, costs: Costs) -> CostEstimate | None:
        """What it expects, once after :meth:`begin`; None where it has no part in adaptive drafting. By
        ``costs`` a pass over n rows takes ``costs.verify(n)`` plain passes."""
        return None

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """Add candidates for the tokens that may follow ``sequence.tokens``, each with a chance."""
        raise NotImplementedError

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """A step was verified, whoever drafted it; ``sequence`` holds its tokens."""
