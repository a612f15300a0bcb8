"""Two levels of speculation: what another drafter drafts is checked by the target over its partial cache."""

from __future__ import annotations

import torch

from tokenswift.kv.sparse import SparseCache
from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.choice import RefusedRow, Sampler
from tokenswift.sampling.masks import NoMask
from tokenswift.spec.accept import accept_exact
from tokenswift.spec.costs import Costs
from tokenswift.spec.drafters.candidates import Candidates, Source
from tokenswift.spec.drafters.drafter import Drafter, Outcome
from tokenswift.spec.drafters.partial import SparseContext
from tokenswift.spec.drafters.registry import CHAIN
from tokenswift.spec.strategy import TokenSequence


class CheckedDrafter:
    """A chain that another drafter wrote and the target, over its partial cache, would write itself.

    Args:
        model: the target.
        context: its partial cache.
        inner: drafts for it.
        sampler: the target's choice rule.
        step: tokens that ``inner`` drafts at a time.
        least: tokens of the chain, one more at most; fewer where a row of one of the two is refused or the
            tree has no room for more, none once either is left out.
    """

    name, mark = "checked", CHAIN

    def __init__(
        self,
        model: BaseTarget,
        context: SparseContext,
        inner: Drafter,
        sampler: Sampler,
        step: int,
        least: int,
    ) -> None:
        self.model, self.context, self.inner, self.sampler = model, context, inner, sampler
        self.step, self.least = step, least
        self.passes = Source("passes over the partial cache")

    @property
    def refusals(self) -> Source:
        """Of the target's rows over its partial cache; of the inner drafter's once that is left out."""
        return self.inner.refusals if self.inner.refusals.dropped else self.passes

    def needs(self, text: int, row: int) -> list[Need]:
        """Both caches."""
        size = (self.context.budget + self.context.scratch) * self.model.kv_bytes
        return [Need("budget", self.context.wanted, size), *self.inner.needs(text, row)]

    def begin(self, sequence: TokenSequence) -> None:
        """Let the inner drafter read the prompt."""
        self.inner.begin(sequence)

    def offer(self, costs: Costs) -> None:
        """No part of adaptive drafting, which asks drafters one by one."""

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """The chain, in parts."""
        if sequence.newest is None or self.refusals.dropped:
            return
        chain: list[int] = []
        cache, room = self.context.cache(sequence), len(candidates.widths)
        least = min(self.least, room)
        while len(chain) < least and not self.refusals.dropped:
            part = self._part(sequence, candidates, cache, chain, least)
            if not part:
                break
            chain += part
            if sequence.has_enough:
                break
        node = 0
        for token in chain[:room]:
            node = candidates.add(node, token)

    def _part(
        self,
        sequence: TokenSequence,
        candidates: Candidates,
        cache: SparseCache,
        chain: list[int],
        least: int,
    ) -> list[int]:
        """What follows the text and ``chain``: drafted, checked over the partial cache, kept as far as the
        target chooses it itself (nothing where it cannot choose)."""
        text = sequence.tokens
        widths = (1,) * min(self.step, least - len(chain))
        inner = Candidates(sequence, self.sampler, candidates.coupled, widths, ahead=chain)
        inner.ask(self.inner)
        tree = inner.tree.build()
        tokens = torch.tensor(tree.tokens)
        positions = torch.tensor(tree.depths) + len(text) + len(chain) - 1
        result = self.model.forward(tokens, positions, cache)
        logits = self.model.logits(result.hidden)
        candidates.passes += 1
        try:
            accepted = accept_exact(tree, logits, text, self.sampler, not self.sampler.walks, ahead=chain)
        except RefusedRow as error:
            self.passes.note(error)
            return []
        except NoMask:  # of a draft; the text may never come there
            return []
        cache.grow(len(accepted.nodes))
        return [*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token]

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Keep both caches in step with the text."""
        if not self.refusals.dropped:
            self.inner.observe(sequence, outcome)
            self.context.observe(sequence, outcome.nodes)
