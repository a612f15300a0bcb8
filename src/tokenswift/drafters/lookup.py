"""Prompt lookup as a drafter: long matches of the text, in every step, for nothing."""

from __future__ import annotations

from tokenswift.drafters.candidates import Candidates
from tokenswift.drafters.costs import Costs
from tokenswift.drafters.offer import Offer, Outcome
from tokenswift.drafters.refusal import Source
from tokenswift.drafters.registry import NGRAM
from tokenswift.drafters.reuse import Reuse
from tokenswift.interfaces import Sequence


class Lookup:
    """What followed earlier occurrences of the newest tokens (see `reuse`).

    Args:
        penalised: the sampler penalises repetition.
    """

    name, mark = "lookup", NGRAM

    def __init__(self, penalised: bool) -> None:
        self.reuse = Reuse(penalised)
        self.refusals = Source("matches of the text")

    def begin(self, sequence: Sequence) -> None:
        """Read the prompt."""
        self.reuse.extend(sequence.tokens)

    def offer(self, costs: Costs) -> Offer:
        """It costs nothing."""
        return Offer("long matches of the text", "the text", tokens=1.0, rows=1, price=0.0)

    def propose(self, sequence: Sequence, candidates: Candidates) -> None:
        """One path."""
        node = 0
        for token, chance in self.reuse.predict():
            node = candidates.add(node, token, chance)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Read on."""
        self.reuse.learn(outcome.tokens)
        self.reuse.extend(outcome.tokens)
