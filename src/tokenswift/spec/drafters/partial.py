"""The target drafts for itself: passes over its partial cache, and the heads after the last of them."""

from __future__ import annotations

from typing import cast

import torch

from tokenswift.interfaces import KVCache
from tokenswift.kv.full import FullCache
from tokenswift.kv.select import select, useful
from tokenswift.kv.sparse import SparseCache
from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.choice import RefusedRow, Sampler
from tokenswift.sampling.masks import NoMask
from tokenswift.spec.accept import accept_exact
from tokenswift.spec.control import CostEstimate, Costs
from tokenswift.spec.drafters.base import CHAIN, HEAD, Drafter, Outcome
from tokenswift.spec.drafters.candidates import Candidates, Source
from tokenswift.spec.drafters.heads import HeadDrafter, newest_hidden
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import DraftSource

PARTIAL = "partial"


class SparseContext:
    """Selects from the full cache, takes in what is committed, and selects anew when it is due.

    Args:
        model: the target.
        policy: one of `kv.select.POLICIES`.
        budget, sinks: B and S of the sparse cache; where every layer has a sliding window, of a larger
            B only what windows and sinks can fill.
        scratch: rows of draft passes per step.
        refresh: new tokens after which the selection is made again; None: when they have replaced all
            of it; 0: never.
        frozen: take in nothing after the first selection.
        chunk: tokens of a chunk (policy "chunks").

    Attributes:
        wanted, budget: B as asked for, and as it is used.
    """

    def __init__(
        self,
        model: BaseTarget,
        policy: str,
        budget: int,
        sinks: int,
        scratch: int,
        refresh: int | None = None,
        frozen: bool = False,
        chunk: int = 8,
    ) -> None:
        self.model = model
        self.policy = policy
        self.wanted, self.budget = budget, useful(budget, model.windows, sinks)
        self.sinks, self.scratch = sinks, scratch
        self.refresh, self.frozen, self.chunk = refresh, frozen, chunk
        self.sparse: SparseCache | None = None

    @property
    def selections(self) -> int:
        """Selections made so far; 0 without a cache."""
        return 0 if self.sparse is None else self.sparse.selections

    def cache(self, sequence: TokenSequence) -> SparseCache:
        """The sparse cache to draft over, without draft rows.

        Raises:
            ValueError: nothing was committed yet.
        """
        full, newest = cast(FullCache, sequence.cache), sequence.newest
        if newest is None:
            raise ValueError("a sparse cache is selected from a full cache that holds tokens")
        sparse = self.sparse
        if sparse is None:
            sparse = self.model.backend.partial_cache(full, self.budget, self.sinks, self.scratch)
            self.sparse = sparse
        if self._due():
            row, windows = sequence.newest_row, self.model.windows
            queries = newest.queries
            chosen = select(self.policy, full, queries, row, windows, self.budget, self.sinks, self.chunk)
            sparse.load(full, chosen)
        sparse.rewind()
        return sparse

    def _due(self) -> bool:
        sparse = self.sparse
        if sparse is None or not sparse.selections:
            return True
        if self.frozen or self.refresh == 0:
            return False
        return sparse.exhausted if self.refresh is None else sparse.replaced >= self.refresh

    def observe(self, sequence: TokenSequence, committed: int) -> None:
        """Take in the last ``committed`` tokens of the full cache."""
        full = cast(FullCache, sequence.cache)
        if self.sparse is not None and not self.frozen:
            self.sparse.rewind()
            self.sparse.append(full, full.length - committed, full.length)


class PartialDrafter(Drafter):
    """Passes of the target along the best path, over the partial cache.

    Args:
        model: the target.
        context: its partial cache; None: the full cache is drafted over.
        heads: go on below the last pass; None: nothing does.
        mark: of its tokens.
        least: while the full cache holds fewer tokens, it is drafted over itself.
    """

    name = PARTIAL

    def __init__(
        self,
        model: BaseTarget,
        context: SparseContext | None,
        heads: HeadDrafter | None = None,
        mark: DraftSource = HEAD,
        least: int = 0,
    ) -> None:
        self.model, self.context, self.heads = model, context, heads
        self.mark, self.least = mark, least
        self.refusals = Source("passes over the partial cache")
        self._prompt = 0

    def begin(self, sequence: TokenSequence) -> None:
        """Settle which tokens the heads may draft, from the prompt."""
        self._prompt = len(sequence.tokens)
        if self.heads is not None:
            self.heads.begin(sequence)

    def needs(self, text: int, row: int) -> list[Need]:
        """The partial cache, which is made once the text is longer than the budget."""
        if self.context is None:
            return []
        rows = self.context.budget + self.context.scratch
        return [Need("budget", self.context.wanted, rows * self.model.kv_bytes, sure=text > self.least)]

    def offer(self, costs: Costs) -> CostEstimate | None:
        """A pass, which reads the weights and the partial cache, and a level."""
        if self.context is None:
            return None
        model, budget = self.model, self.context.budget
        kept, cached = budget * model.kv_bytes, max(budget, self._prompt) * model.kv_bytes
        cost = (model.weight_bytes + kept) / (model.weight_bytes + cached)
        return CostEstimate(
            "passes over the partial cache",
            "the partial pass",
            tokens=2.1,
            rows=4,
            price=cost + costs.level(),
            pass_cost=cost,
            lead=0.85,
            least=budget,
            loads=True,
        )

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """A chain, and levels of the heads below its end."""
        if sequence.newest is None or self.refusals.dropped:
            return
        cache, sparse = self._cache(sequence, candidates)
        start, states = len(sequence.tokens) - 1, [newest_hidden(sequence)]  # after so many passes

        def run(path: list[int]) -> torch.Tensor:
            if path and sparse is not None:
                sparse.grow(1)  # the pass before is context of this one
            token = torch.tensor(path[-1:] or sequence.tokens[-1:])
            position = torch.tensor([start + len(path)])
            states.append(self.model.forward(token, position, cache).hidden)
            return self.model.logits(states[-1])

        nodes = candidates.chain(run, kind="backbone")
        if nodes and self.heads is not None:
            self.heads.grow(candidates, nodes, states[candidates.tree.depths[nodes[0]]], "after")

    def _cache(self, sequence: TokenSequence, candidates: Candidates) -> tuple[KVCache, SparseCache | None]:
        """What to draft over, also as the sparse cache that it is."""
        if self.context is None or sequence.cache.length < self.least:
            return sequence.cache, None
        before = self.context.selections
        cache = self.context.cache(sequence)
        candidates.loaded |= self.context.selections != before  # once in many steps: no price of a step
        return cache, cache

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Keep the cache in step with the text while it is used; drop it otherwise."""
        if self.context is None:
            return
        if outcome.in_use:
            self.context.observe(sequence, outcome.nodes)
        else:
            self.context.sparse = None


# ---- two levels ---------------------------------------------------------------------------------


class CheckedDrafter(Drafter):
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
