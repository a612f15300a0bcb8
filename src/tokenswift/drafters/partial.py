"""The target drafts for itself: passes over its partial cache, and the heads after the last of them."""

from __future__ import annotations

from time import perf_counter

import torch

from tokenswift.drafters.candidates import Candidates
from tokenswift.drafters.context import SparseContext
from tokenswift.drafters.control import first_level_ms
from tokenswift.drafters.costs import Costs
from tokenswift.drafters.heads import newest_hidden
from tokenswift.drafters.hidden import HeadGrower
from tokenswift.drafters.offer import Offer, Outcome
from tokenswift.drafters.refusal import pass_source
from tokenswift.drafters.registry import HEAD
from tokenswift.interfaces import DraftModel, Sequence

PARTIAL = "partial"


class PartialDrafter:
    """Passes along the likeliest path while it is likely enough.

    Args:
        model: the target.
        context: its partial cache.
        grower: the heads, or None.
    """

    name, mark = PARTIAL, HEAD

    def __init__(self, model: DraftModel, context: SparseContext, grower: HeadGrower | None) -> None:
        self.model, self.context, self.grower = model, context, grower
        self.refusals = pass_source()

    def begin(self, sequence: Sequence) -> None:
        """Settle which tokens the heads may draft, from the prompt."""
        if self.grower is not None:
            self.grower.begin(sequence)

    def offer(self, costs: Costs) -> Offer:
        """A pass and a level."""
        return partial_offer(costs, self.context.budget)

    def propose(self, sequence: Sequence, candidates: Candidates) -> None:
        """A chain, and levels of the heads below its end."""
        begun, before = perf_counter(), self.context.selections
        cache = self.context.cache(sequence)
        if self.context.selections != before:  # once in many steps: no price of a step
            candidates.loading = perf_counter() - begun
        model, start, hidden = self.model, len(sequence.tokens) - 1, newest_hidden(sequence)

        def run(path: list[int]) -> torch.Tensor:
            nonlocal hidden
            token = torch.tensor([path[-1] if path else sequence.tokens[-1]], device=model.device)
            position = torch.tensor([start + len(path)], device=model.device)
            hidden = model.forward(token, position, cache).hidden
            cache.grow(1)
            return model.logits(hidden)

        node, chance = candidates.chain(sequence, run, kind="backbone")
        control, grower = candidates.control, self.grower
        worth = control.rate * (control.level_ms + control.row_ms)
        if grower is not None and chance * grower.best[0] > worth:
            grower.grow(candidates, node, hidden, "after")

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Keep the cache in step with the text while it is used; drop it otherwise."""
        if outcome.in_use:
            self.context.observe(sequence, outcome.nodes)
        else:
            self.context.sparse = None


def partial_offer(costs: Costs, budget: int) -> Offer:
    """What passes over a partial cache of ``budget`` tokens expect."""
    pass_ms = costs.verify(1, budget)
    return Offer(
        "passes over the partial cache",
        "the partial pass",
        tokens=2.1,
        rows=4,
        price=pass_ms + first_level_ms(costs),
        pass_ms=pass_ms,
        lead=0.85,
        least=budget,
        loads=True,
    )
