"""Passes of a draft model that the user gave, along the likeliest path."""

from __future__ import annotations

from time import perf_counter

from tokenswift.drafters.candidates import CHAIN, Candidates
from tokenswift.drafters.chain import ModelDrafter
from tokenswift.drafters.costs import Costs
from tokenswift.drafters.offer import Offer, Outcome
from tokenswift.drafters.registry import CHAIN as MARK
from tokenswift.interfaces import DraftModel, Sequence

MODEL = "model"


class GuestDrafter:
    """A draft model in automatic drafting.

    Args:
        guest: it, over its own cache.
        target: the model that it drafts for.
    """

    name, mark = MODEL, MARK

    def __init__(self, guest: ModelDrafter, target: DraftModel) -> None:
        self.guest, self.target, self.refusals = guest, target, guest.source

    def begin(self, sequence: Sequence) -> None:
        """Run the prompt."""
        self.guest.begin(sequence.tokens)

    def offer(self, costs: Costs) -> Offer:
        """Two passes, at the target's price by the byte of weights."""
        return guest_offer(costs.verify(1, 0) * self.guest.model.weight_bytes / self.target.weight_bytes)

    def propose(self, sequence: Sequence, candidates: Candidates) -> None:
        """A chain."""
        guest, text = self.guest, sequence.tokens
        begun = perf_counter()
        if guest.catch_up(text):
            candidates.loading = perf_counter() - begun
        most = min(CHAIN, guest.passes(text))
        candidates.chain(sequence, lambda path: guest.row(text, path), guest.subset, most=most)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Settle the draft rows (which does nothing once the model is left out)."""
        self.guest.observe(sequence.tokens)


def guest_offer(pass_ms: float) -> Offer:
    """What a draft model expects whose passes take about so many milliseconds."""
    return Offer(
        "the draft model", "the draft model", 2.1, 3, 2 * pass_ms, pass_ms=pass_ms, lead=0.6, given=True
    )
