"""Drafters that run a model: the target over a partial KV cache, a draft model over a small cache
of its own, and both in two levels (TriForce).

With coupled candidates (Daliri et al. 2024), a draft is ranked with the noise that the target will
use at the same position, so it is right wherever both would choose the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor

from tokenswift.kv.cache import KVCache
from tokenswift.kv.sparse import SparseCache, select, useful_budget
from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.masks import NoMask
from tokenswift.sampling.sampler import RefusedRow
from tokenswift.speculation.accept import accept_exact
from tokenswift.speculation.control import LEVEL, CostEstimate, Costs
from tokenswift.speculation.drafters.base import Candidates, Drafter, DraftVocabulary, Outcome
from tokenswift.speculation.drafters.heads import HeadDrafter
from tokenswift.speculation.sequence_state import SequenceState

MODEL, PARTIAL = "model", "partial"
# tokens that a step leaves unknown to a draft model at most: the root, and two it did not draft
_LAG = 3


# ---- self-speculation: the target over a partial cache -------------------------------------------


@dataclass(eq=False)
class SparseContext:
    """The target's partial KV cache: selects from the full cache, appends committed tokens, selects
    anew when due.

    Args:
        model: the target.
        policy: how positions are selected, see `kv.select`.
        asked_budget, sinks: B and S, in tokens.
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
    asked_budget: int
    sinks: int
    scratch: int
    refresh: int | None = None
    frozen: bool = False
    chunk: int = 8
    sparse: SparseCache | None = None

    def __post_init__(self) -> None:
        self.budget = useful_budget(self.asked_budget, self.model.windows, self.sinks)

    def need(self, sure: bool = True) -> Need:
        """Memory of the cache."""
        size = (self.budget + self.scratch) * self.model.kv_bytes
        return Need("budget", self.asked_budget, size, sure=sure)

    def cache(self, sequence: SequenceState, candidates: Candidates) -> SparseCache:
        """The cache to draft over, without draft rows; a due selection is made first.

        Raises:
            ValueError: nothing was committed yet.
        """
        full, newest = sequence.cache, sequence.last_pass
        if newest is None:
            raise ValueError("a sparse cache is selected from a full cache that holds tokens")
        sparse = self.sparse
        if sparse is None:
            sparse = SparseCache(full, self.budget, self.sinks, self.scratch)
            self.sparse = sparse
        if self._due(sparse):
            candidates.loaded = True
            queries, windows = newest.queries, self.model.windows
            if full.tail is not None:  # layers with windows are read in the full cache
                queries = [
                    query for query, window in zip(queries, windows, strict=True) if window is None
                ]
                windows = [None] * len(queries)
            sizes = (windows, self.budget, self.sinks, self.chunk)
            sparse.load(full, select(self.policy, full, queries, sequence.last_row, *sizes))
        sparse.rewind()
        return sparse

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
        least: while the full cache holds fewer tokens than this, drafts over the full cache.
    """

    model: BaseTarget
    context: SparseContext | None
    heads: HeadDrafter | None = None
    source: str = "head"
    least: int = 0
    name = PARTIAL
    _prompt = 0  # length of the prompt

    def begin(self, sequence: SequenceState) -> None:
        """Give the heads the prompt, which decides the tokens that they may draft."""
        self._prompt = len(sequence.tokens)
        if self.heads is not None:
            self.heads.begin(sequence)

    def needs(self, text: int, row: int) -> list[Need]:
        """The partial cache, which is used once the sequence is longer than the budget."""
        return [] if self.context is None else [self.context.need(text > self.least)]

    def estimate(self, costs: Costs) -> CostEstimate | None:
        """One pass, which reads the weights and the partial cache, and a level of heads."""
        if self.context is None:
            return None
        model, budget = self.model, self.context.budget
        kept, cached = budget * model.kv_bytes, max(budget, self._prompt) * model.kv_bytes
        cost = (model.weight_bytes + kept) / (model.weight_bytes + cached)
        words, price = "passes over the partial cache", cost + LEVEL
        return CostEstimate(
            words, 2.1, 4, price, pass_cost=cost, best_chance=0.85, least=budget, loads=True
        )

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """A chain by passes, then a tree by the heads below its end."""
        if sequence.last_pass is None:
            return
        context, sparse, full = self.context, None, sequence.cache
        if context is not None and full.length >= self.least:
            sparse = context.cache(sequence, candidates)
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


# ---- a draft model -------------------------------------------------------------------------------


@dataclass(eq=False)
class ModelContext:
    """A draft model and its small KV cache, which follow the sequence.

    With ``kv`` "streaming" (StreamingLLM), the cache holds sinks and a window of recent tokens, and
    positions stay below B however long the sequence is. Of these positions, ``longest + 2`` are for
    draft rows, an eighth is room through which the window moves, and the rest are slots of the
    cache. The sinks' keys are rotated to stay next to the window; at the end of its room, the
    window's keys are rotated back to its beginning. (A budget too small for all this keeps one
    slot, and drafts are cut short.) With "snapkv", the cache is selected from the prompt by pooled
    attention, positions are the sequence's, and new tokens replace the least important ones.

    Args:
        model: the draft model; same tokenizer as the target.
        size: vocabulary size of the target.
        kv: "streaming" or "snapkv".
        budget, sinks: B and S in tokens; B includes draft rows with "streaming".
        longest: tokens drafted in a step at most.
        frequent: token ids that may be drafted besides the prompt's; None: all.
    """

    model: BaseTarget
    size: int
    kv: str
    budget: int
    sinks: int
    longest: int
    frequent: Tensor | None = None
    _known = 0  # committed tokens that the model has run
    _shift = 0  # a token's position in the sequence minus its position in the model
    _origin = None  # the sinks' keys as first written, (layers, K, S, d)
    _turned = 0  # positions that the sinks' keys have been rotated by

    def __post_init__(self) -> None:
        self.budget = min([self.budget, *(w for w in self.model.windows if w is not None)])
        self.slots = self.budget
        if self.kv == "streaming":
            spare = max(1, (self.budget - self.sinks) // 8) + self.longest + 2
            self.slots = max(1, self.budget - spare)
        self.room = max(0, self.budget - self.slots - self.longest - 2)
        self.sinks = min(self.sinks, self.slots - 1)
        self.vocabulary = DraftVocabulary(self.model, self.size)
        self._drafted: list[int] = []  # tokens of the draft rows

    @torch.inference_mode()
    def begin(self, tokens: list[int], check: Callable[[], None] = lambda: None) -> None:
        """Prefill all tokens but the last (the root); ``check`` is called between passes."""
        last = self.model.vocab_size - 1  # stands in for tokens that the model does not have
        known = [min(token, last) for token in tokens[:-1]]
        self.vocabulary = DraftVocabulary(self.model, self.size, self.frequent, tokens)
        run = known
        if self.kv == "streaming" and len(known) > self.slots:
            run = known[: self.sinks] + known[len(known) - (self.slots - self.sinks) :]
        self._known, self._shift = len(known), len(known) - len(run)
        full = self.model.new_cache(max(1, len(run)), whole=True)
        cache = SparseCache(full, self.slots, self.sinks, self.longest + 2)
        if run:
            last = self.model.prefill(run, full, lambda stage, done, total: check())
            policy = "snapkv" if self.kv == "snapkv" else "recent"
            row, windows = len(last.hidden) - 1, self.model.windows
            cache.load(
                full, select(policy, full, last.queries, row, windows, self.slots, self.sinks)
            )
            cache.positions[:, :, self.sinks :] += self._shift  # positions in the sequence
        self._cache = cache
        self._rotate()

    def passes(self, text: list[int], ahead: Sequence[int] = ()) -> int:
        """Number of draft passes that the positions left after ``text`` and ``ahead`` allow, at
        least 1."""
        if self.kv != "streaming":
            return len(text)
        return max(1, self.budget + 1 - (len(text) + len(ahead) - self._shift))

    @torch.inference_mode()
    def row(self, text: list[int], ahead: Sequence[int]) -> Tensor:
        """Logits (1, S) of the token after ``text`` and ``ahead``, by one pass over the tokens not
        run yet; draft rows with the same tokens are reused.

        Args:
            text: the sequence's tokens.
            ahead: drafted tokens after them.
        """
        fresh = [*text[self._known :], *ahead]
        same = min(len(commonprefix((self._drafted, fresh))), len(fresh) - 1)
        self._cache.rewind(same)
        start = self._known + same - self._shift
        tokens = torch.tensor(fresh[same:]).clamp(max=self.model.vocab_size - 1)  # see `begin`
        positions = torch.arange(start, start + len(tokens))
        result = self.model.forward(tokens, positions, self._cache)
        self._cache.grow(len(tokens))
        self._drafted = fresh
        return self.vocabulary.project(self.model.norm(result.hidden[-1:]))

    def catch_up(self, tokens: list[int], check: Callable[[], None] = lambda: None) -> bool:
        """Run the tokens that came while this model was not in use; whether there were any.
        ``check`` is called between passes."""
        lagged = len(tokens) - self._known > _LAG
        if len(tokens) - self._known > 8 * self.longest:
            self.begin(tokens, check)
        while len(tokens) - self._known > _LAG:
            check()
            part = tokens[: self._known + self.longest + 1]
            self.row(part, ())
            self.observe(part)
        return lagged

    @torch.inference_mode()
    def observe(self, tokens: list[int]) -> None:
        """Commit the draft rows whose tokens were accepted (the last of ``tokens`` is the root)."""
        kept = len(commonprefix((self._drafted, tokens[self._known : -1])))
        self._cache.commit_drafted(kept, self._known)
        self._known += kept
        self._drafted = []
        self._rotate()

    def _rotate(self) -> None:
        """Keep positions below the budget, and the sinks next to the window (streaming only)."""
        cache = self._cache
        if self.kv != "streaming" or cache.filled < self.slots:
            return
        if self._origin is None:
            self._origin = cache.entries.keys(slice(None), 0, cache.sinks).clone()
        gap = self._known - self._shift - self.slots
        if gap > self.room:
            cache.turn_window(-gap, self.model.rotary.single())
            self._shift += gap
            gap = 0
        if gap != self._turned:
            cache.turn_sinks(gap, self.model.rotary.single(), self._origin)
            self._turned = gap


class ModelDrafter(Drafter):
    """Drafts a chain by passes of a draft model.

    Args:
        context: the draft model with its cache.
        target: the model that it drafts for.
        option: name and value of the option that sets its cache's size, for errors.
    """

    name, source = MODEL, "chain"

    def __init__(
        self, context: ModelContext, target: BaseTarget, option: tuple[str, object]
    ) -> None:
        self.context, self.target, self.option = context, target, option

    def begin(self, sequence: SequenceState) -> None:
        """Prefill the draft model."""
        self.context.begin(sequence.tokens, sequence.raise_if_cancelled)

    def needs(self, text: int, row: int) -> list[Need]:
        """The draft model's cache."""
        context = self.context
        return [Need(*self.option, context.model.cache_bytes(context.slots + context.longest + 2))]

    def estimate(self, costs: Costs) -> CostEstimate:
        """Two passes, with costs in proportion to the bytes of weights."""
        cost = self.context.model.weight_bytes / self.target.weight_bytes
        return CostEstimate("the draft model", 2.1, 3, 2 * cost, pass_cost=cost, best_chance=0.6)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """A chain."""
        context, text = self.context, sequence.tokens
        candidates.loaded |= context.catch_up(text, sequence.raise_if_cancelled)
        candidates.add_by_passes(
            lambda nodes: context.row(text, candidates.path(nodes[0])),
            context.vocabulary.subset,
            per_pass=1,
            max_nodes=context.passes(text, candidates.ahead) - 1,
        )

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Commit the draft rows that were accepted."""
        self.context.observe(sequence.tokens)


# ---- two levels (TriForce) -----------------------------------------------------------------------


class TwoLevelDrafter(Drafter):
    """Drafts a chain by speculation: an inner drafter drafts, and the target over its partial cache
    verifies.

    Args:
        context: the target's partial cache.
        inner: the inner drafter.
        step: tokens that ``inner`` drafts at a time.
        goal: tokens of the chain; one more at most, fewer after invalid logits or where the tree is
            full.
    """

    name, source = "checked", "chain"

    def __init__(self, context: SparseContext, inner: Drafter, step: int, goal: int) -> None:
        self.context, self.inner, self.step, self.goal = context, inner, step, goal

    def needs(self, text: int, row: int) -> list[Need]:
        """Both caches."""
        return [self.context.need(), *self.inner.needs(text, row)]

    def begin(self, sequence: SequenceState) -> None:
        """Show the inner drafter the prompt."""
        self.inner.begin(sequence)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """A chain, made part by part."""
        if sequence.last_pass is None:
            return
        chain: list[int] = []
        cache, room = self.context.cache(sequence, candidates), len(candidates.widths)
        goal = min(self.goal, room)
        while len(chain) < goal:
            part = self._part(sequence, candidates, cache, chain, goal)
            if not part:
                break
            chain += part
        node = 0
        for token in chain[:room]:
            node = candidates.add(node, token)

    def _part(
        self,
        sequence: SequenceState,
        candidates: Candidates,
        cache: SparseCache,
        chain: list[int],
        goal: int,
    ) -> list[int]:
        """The next tokens of the chain: drafted, verified over the partial cache, and accepted by
        the exact rule; empty after invalid logits."""
        text, sampler = sequence.tokens, candidates.sampler
        widths = (1,) * min(self.step, goal - len(chain))
        inner = Candidates(sequence, sampler, candidates.coupled, widths, ahead=chain)
        inner.ask(self.inner)
        tree = inner.tree.build()
        tokens = torch.tensor(tree.tokens)
        positions = torch.tensor(tree.depths) + len(text) + len(chain) - 1
        result = self.context.model.forward(tokens, positions, cache)
        logits = self.context.model.logits(result.hidden)
        candidates.passes += 1
        try:
            accepted = accept_exact(
                tree, logits, text, sampler, not sampler.row_by_row, ahead=chain
            )
        except (RefusedRow, NoMask):  # on a drafted path, which the target may never take
            return []
        cache.grow(len(accepted.nodes))
        return [*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token]

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Append the step's tokens to both caches."""
        self.inner.observe(sequence, outcome)
        self.context.observe(sequence, outcome.nodes)
