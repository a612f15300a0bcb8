"""What a grammar forces: text that has to come is drafted, in the tokens that the tokenizer has for it."""

from __future__ import annotations

from tokenswift.sampling.masks import Masks
from tokenswift.spec.control import CostEstimate, Costs
from tokenswift.spec.drafters.base import GRAMMAR, Drafter, Outcome
from tokenswift.spec.drafters.candidates import Candidates, Source
from tokenswift.spec.strategy import TokenSequence

MOST = 31  # tokens drafted in a step
_FIRST, _SLOW = 0.5, 1 / 16  # chance of a token that is not certain, and the weight of a new one


class GrammarDrafter(Drafter):
    """The forced text, in every step, for the price of its rows. Where it could be written in other tokens,
    and its last token could reach beyond it, the tokenizer's own are proposed.

    Args:
        masks: of the text.
    """

    name, mark = "grammar", GRAMMAR

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.refusals = Source("the grammar")
        self._chance = _FIRST
        self._open: tuple[int, int] | None = None  # place in the step, and token, of the first uncertain one

    def offer(self, costs: Costs) -> CostEstimate:
        """It costs nothing."""
        return CostEstimate("text that the grammar forces", "the grammar", tokens=1.0, rows=1, price=0.0)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """One path."""
        tokens, sure = self.masks.forced(sequence.tokens)
        self._open = (sure, tokens[sure]) if sure < len(tokens) else None
        node = 0
        for place, token in enumerate(tokens[:MOST]):
            node = candidates.add(node, token, 1.0 if place < sure else self._chance)

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Learn how often a token came that was not certain."""
        if self._open is not None and self._open[0] < len(outcome.tokens):
            place, token = self._open
            self._chance += _SLOW * ((outcome.tokens[place] == token) - self._chance)
