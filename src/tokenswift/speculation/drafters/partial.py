"""Self-speculation: drafts by passes of the target over a partial KV cache.

With coupled candidates (Daliri et al. 2024), a draft is ranked with the noise that the target will
use at the same position, so it is right wherever both would choose the same token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenswift.kv.cache import FullCache, KVCache
from tokenswift.kv.passes import Pass
from tokenswift.kv.sparse import SparseCache, select, useful_budget
from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.speculation.costs import FIRST_COST, CostEstimate, Costs
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.drafters.heads import HeadDrafter
from tokenswift.speculation.sequence_state import SequenceState

PARTIAL = "partial"


@dataclass(eq=False)
class SparseContext:
    """The target's partial KV cache: selects from the full cache, appends committed tokens, selects
    anew when due.

    Args:
        model: the target.
        policy: how positions are selected, see `kv.select`.
        wanted_budget: B, in tokens.
        sinks: S, in tokens.
        scratch: rows of draft passes in a step.
        refresh: new tokens after which the selection is repeated; None: once they have replaced all
            of it; 0: never.
        frozen: append nothing after the first selection.
        chunk: tokens of a chunk, for the policy "chunks".
        sparse: the cache; None before the first selection.

    Attributes:
        budget: B as used: at most what sinks and windows fill, where every layer has a sliding
            window.
    """

    model: BaseTarget
    policy: str
    wanted_budget: int
    sinks: int
    scratch: int
    refresh: int | None = None
    frozen: bool = False
    chunk: int = 8
    sparse: SparseCache | None = None
    budget: int = field(init=False)

    def __post_init__(self) -> None:
        self.budget = useful_budget(self.wanted_budget, self.model.windows, self.sinks)

    def need(self, sure: bool = True) -> Need:
        """Memory of the cache."""
        size = (self.budget + self.scratch) * self.model.kv_bytes
        return Need("budget", self.wanted_budget, size, sure=sure)

    def cache(self, sequence: SequenceState, candidates: Candidates) -> SparseCache:
        """The cache to draft over, without draft rows; a due selection is made first.

        Raises:
            ValueError: nothing was committed yet.
        """
        full = sequence.cache
        newest = sequence.last_pass
        if newest is None:
            raise ValueError("a sparse cache is selected from a full cache that holds tokens")
        if self.sparse is None:
            self.sparse = SparseCache(full, self.budget, self.sinks, self.scratch)
        if self._due(self.sparse):
            candidates.loaded = True
            self.sparse.load(full, self._selected(full, newest, sequence.last_row))
        self.sparse.rewind()
        return self.sparse

    def _selected(self, full: FullCache, newest: Pass, row: int) -> list[torch.Tensor]:
        """The positions of each layer that the policy selects, by a pass's queries in a row."""
        queries = newest.queries
        windows = self.model.windows
        if full.tail is not None:  # layers with windows are read in the full cache
            pairs = zip(queries, windows, strict=True)
            queries = [query for query, window in pairs if window is None]
            windows = [None] * len(queries)
        return select(
            self.policy,
            full,
            queries,
            row,
            windows=windows,
            budget=self.budget,
            sinks=self.sinks,
            chunk=self.chunk,
        )

    def _due(self, sparse: SparseCache) -> bool:
        if not sparse.selections or self.frozen or self.refresh == 0:
            return not sparse.selections
        return sparse.exhausted if self.refresh is None else sparse.replaced >= self.refresh

    def observe(self, sequence: SequenceState, committed: int) -> None:
        """Append the last ``committed`` tokens of the full cache."""
        full = sequence.cache
        if self.sparse is not None and not self.frozen:
            self.sparse.rewind()
            self.sparse.append(full, full.length - committed, full.length)


@dataclass(eq=False)
class PartialDrafter(Drafter):
    """Drafts by passes of the target over its partial cache, along the best path, then by heads.

    Args:
        model: the target.
        context: the partial cache; None: drafts over the full cache.
        heads: continue below the last pass; None: nothing does.
        source: see `Drafter`.
        min_cached: while the full cache holds fewer tokens than this, drafts over the full cache.
    """

    model: BaseTarget
    context: SparseContext | None
    heads: HeadDrafter | None = None
    source: str = "head"
    min_cached: int = 0
    name: str = field(init=False, default=PARTIAL)
    _prompt: int = field(init=False, default=0)  # length of the prompt

    def begin(self, sequence: SequenceState) -> None:
        """Give the heads the prompt, which decides the tokens that they may draft."""
        self._prompt = len(sequence.tokens)
        if self.heads is not None:
            self.heads.begin(sequence)

    def needs(self, text: int, row: int) -> list[Need]:
        """The partial cache, which is used once the sequence is longer than the budget."""
        return [] if self.context is None else [self.context.need(text > self.min_cached)]

    def estimate(self, costs: Costs) -> CostEstimate | None:
        """One pass, which reads the weights and the partial cache, and a level of heads."""
        if self.context is None:
            return None
        model = self.model
        budget = self.context.budget
        partial_bytes = budget * model.kv_bytes
        full_bytes = max(budget, self._prompt) * model.kv_bytes
        cost = (model.weight_bytes + partial_bytes) / (model.weight_bytes + full_bytes)
        return CostEstimate(
            "passes over the partial cache",
            tokens=2.1,
            rows=4,
            draft_cost=cost + FIRST_COST,
            pass_cost=cost,
            best_chance=0.85,
            min_cached=budget,
            loads=True,
        )

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """A chain by passes, then a tree by the heads below its end."""
        if sequence.last_pass is None:
            return
        sparse = None
        full = sequence.cache
        if self.context is not None and full.length >= self.min_cached:
            sparse = self.context.cache(sequence, candidates)
        cache: KVCache = full if sparse is None else sparse
        start = len(sequence.tokens) - 1
        states = [sequence.last_pass.hidden[sequence.last_row][None]]  # (1, D) after 0, 1, … passes

        def run(nodes: list[int]) -> torch.Tensor:
            path = candidates.path(nodes[0])
            if path and sparse is not None:
                sparse.grow(1)  # keep the row of the previous pass
            token = torch.tensor(path[-1:] or sequence.tokens[-1:])
            position = torch.tensor([start + len(path)])
            states.append(self.model.forward(token, position, cache).hidden)
            return self.model.logits(states[-1])

        nodes = candidates.add_by_passes(run, kind="backbone", per_pass=1)
        if nodes and self.heads is not None:
            self.heads.grow(candidates, nodes, states[candidates.tree.depths[nodes[0]]], "after")

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Append the step's tokens to the cache while in use; drop it otherwise."""
        if self.context is None:
            return
        if outcome.in_use:
            self.context.observe(sequence, outcome.nodes)
        else:
            self.context.sparse = None
