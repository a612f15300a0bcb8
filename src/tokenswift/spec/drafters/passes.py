"""Drafters that make passes: the target's own over a part of its cache, a draft model's over a small cache of
its own, and the one over the other.

With coupled candidates (Daliri et al. 2024) a draft model chooses with the noise that the target will use at
the same position, so it guesses right wherever both would choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor

from tokenswift.kv import KVCache, SparseCache, select, useful
from tokenswift.memory import Need
from tokenswift.models.decoder import BaseTarget
from tokenswift.sampling.choice import RefusedRow
from tokenswift.sampling.masks import NoMask
from tokenswift.spec.accept import accept_exact
from tokenswift.spec.control import LEVEL, CostEstimate, Costs
from tokenswift.spec.drafters.base import Candidates, Drafter, DraftVocabulary, Outcome
from tokenswift.spec.drafters.heads import HeadDrafter
from tokenswift.spec.strategy import TokenSequence

MODEL, PARTIAL = "model", "partial"
_LAG = 3  # tokens without slots that a step leaves at most: the newest, and two accepted undrafted


# ---- the target's own passes -----------------------------------------------------------------------


@dataclass(eq=False)
class SparseContext:
    """Selects from the full cache, takes in what is committed, and selects anew when it is due.

    Args:
        model: the target.
        policy: one of `kv.POLICIES`.
        wanted, sinks: B and S of the sparse cache; where every layer has a sliding window, of a larger
            B only what windows and sinks can fill.
        scratch: rows of draft passes per step.
        refresh: new tokens after which the selection is made again; None: when they have replaced all
            of it; 0: never.
        frozen: take in nothing after the first selection.
        chunk: tokens of a chunk (policy "chunks").
        sparse: the cache, once there is one.

    Attributes:
        budget: B as it is used.
    """

    model: BaseTarget
    policy: str
    wanted: int
    sinks: int
    scratch: int
    refresh: int | None = None
    frozen: bool = False
    chunk: int = 8
    sparse: SparseCache | None = None

    def __post_init__(self) -> None:
        self.budget = useful(self.wanted, self.model.windows, self.sinks)

    def need(self, sure: bool = True) -> Need:
        """Its memory."""
        size = (self.budget + self.scratch) * self.model.kv_bytes
        return Need("budget", self.wanted, size, sure=sure)

    def cache(self, sequence: TokenSequence, candidates: Candidates) -> SparseCache:
        """The sparse cache to draft over, without draft rows; a selection for it is no price of the step.

        Raises:
            ValueError: nothing was committed yet.
        """
        full, newest = sequence.cache, sequence.newest
        if newest is None:
            raise ValueError("a sparse cache is selected from a full cache that holds tokens")
        sparse = self.sparse
        if sparse is None:
            sparse = SparseCache(full, self.budget, self.sinks, self.scratch)
            self.sparse = sparse
        if self._due(sparse):
            candidates.loaded = True
            queries, windows = newest.queries, self.model.windows
            if full.tail is not None:  # it is read as it is
                queries = [query for query, window in zip(queries, windows, strict=True) if window is None]
                windows = [None] * len(queries)
            sizes = (windows, self.budget, self.sinks, self.chunk)
            sparse.load(full, select(self.policy, full, queries, sequence.newest_row, *sizes))
        sparse.rewind()
        return sparse

    def _due(self, sparse: SparseCache) -> bool:
        if not sparse.selections or self.frozen or self.refresh == 0:
            return not sparse.selections
        return sparse.exhausted if self.refresh is None else sparse.replaced >= self.refresh

    def observe(self, sequence: TokenSequence, committed: int) -> None:
        """Take in the last ``committed`` tokens of the full cache."""
        full = sequence.cache
        if self.sparse is not None and not self.frozen:
            self.sparse.rewind()
            self.sparse.append(full, full.length - committed, full.length)


@dataclass(eq=False)
class PartialDrafter(Drafter):
    """Passes of the target along the best path, over the partial cache.

    Args:
        model: the target.
        context: its partial cache; None: the full cache is drafted over.
        heads: go on below the last pass; None: nothing does.
        mark: of its tokens.
        least: while the full cache holds fewer tokens, it is drafted over itself.
    """

    model: BaseTarget
    context: SparseContext | None
    heads: HeadDrafter | None = None
    mark: str = "head"
    least: int = 0
    name = PARTIAL
    _prompt = 0  # length of the prompt

    def begin(self, sequence: TokenSequence) -> None:
        """Settle which tokens the heads may draft, from the prompt."""
        self._prompt = len(sequence.tokens)
        if self.heads is not None:
            self.heads.begin(sequence)

    def needs(self, text: int, row: int) -> list[Need]:
        """The partial cache, which is made once the text is longer than the budget."""
        return [] if self.context is None else [self.context.need(text > self.least)]

    def offer(self, costs: Costs) -> CostEstimate | None:
        """A pass, which reads the weights and the partial cache, and a level."""
        if self.context is None:
            return None
        model, budget = self.model, self.context.budget
        kept, cached = budget * model.kv_bytes, max(budget, self._prompt) * model.kv_bytes
        cost = (model.weight_bytes + kept) / (model.weight_bytes + cached)
        words, price = "passes over the partial cache", cost + LEVEL
        return CostEstimate(words, 2.1, 4, price, pass_cost=cost, lead=0.85, least=budget, loads=True)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """A chain, and levels of the heads below its end."""
        if sequence.newest is None:
            return
        context, sparse, full = self.context, None, sequence.cache
        if context is not None and full.length >= self.least:
            sparse = context.cache(sequence, candidates)
        cache: KVCache = full if sparse is None else sparse
        start = len(sequence.tokens) - 1
        states = [sequence.newest.hidden[sequence.newest_row][None]]  # after so many passes

        def run(nodes: list[int]) -> torch.Tensor:
            path = candidates.path(nodes[0])
            if path and sparse is not None:
                sparse.grow(1)  # the pass before is context of this one
            token = torch.tensor(path[-1:] or sequence.tokens[-1:])
            position = torch.tensor([start + len(path)])
            states.append(self.model.forward(token, position, cache).hidden)
            return self.model.logits(states[-1])

        nodes = candidates.spread(run, kind="backbone", places=1)
        if nodes and self.heads is not None:
            self.heads.grow(candidates, nodes, states[candidates.tree.depths[nodes[0]]], "after")

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Keep the cache in step with the text while it is used; drop it otherwise."""
        if self.context is None:
            return
        if outcome.in_use:
            self.context.observe(sequence, outcome.nodes)
        else:
            self.context.sparse = None


# ---- a draft model ---------------------------------------------------------------------------------


@dataclass(eq=False)
class ModelContext:
    """A draft model and its sparse cache, kept in step with the text.

    With ``kv`` "streaming" (StreamingLLM) the cache holds sinks and a window of recent tokens, and the
    model's positions stay below B: it runs as if the text were B tokens long, however long it is. Of
    the B positions, ``longest + 2`` are for tokens drafted and run, an eighth are room that the window
    moves through, and the slots of the cache are the others. The sinks' keys turn along with the
    window; where its room ends, the window's keys are turned back to where they began. (A budget that is
    smaller than all this keeps one slot, and drafts are cut short.) With "snapkv" the cache is selected from
    the whole prompt by pooled attention, positions are the text's, and what is generated replaces the
    least important part.

    Args:
        model: the draft model; same tokenizer as the target.
        size: tokens of the target.
        kv: "streaming" or "snapkv".
        budget, sinks: B and S of its cache, draft rows included (streaming) or not (snapkv).
        longest: tokens that may be drafted and run before they are committed.
        frequent: token ids that may be drafted besides the prompt's; None for all.
    """

    model: BaseTarget
    size: int
    kv: str
    budget: int
    sinks: int
    longest: int
    frequent: Tensor | None = None
    _known = 0  # tokens of the text that have slots
    _shift = 0  # text position minus the model's position
    _origin = None  # the sinks' keys as first written
    _turned = 0  # positions that the sinks have moved

    def __post_init__(self) -> None:
        self.budget = min([self.budget, *(w for w in self.model.windows if w is not None)])
        self.slots = self.budget
        if self.kv == "streaming":
            spare = max(1, (self.budget - self.sinks) // 8) + self.longest + 2
            self.slots = max(1, self.budget - spare)
        self.room = max(0, self.budget - self.slots - self.longest - 2)
        self.sinks = min(self.sinks, self.slots - 1)
        self.vocabulary = DraftVocabulary(self.model, self.size)
        self._drafted: list[int] = []  # tokens of the draft rows; those that nobody knows yet are negative

    @torch.inference_mode()
    def begin(self, tokens: list[int], check: Callable[[], None] = lambda: None) -> None:
        """Run the prompt, all but its last token (the first root); ``check`` is called between passes."""
        last = self.model.vocab_size - 1  # it stands for tokens that the model has no row for
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
            cache.load(full, select(policy, full, last.queries, row, windows, self.slots, self.sinks))
            cache.positions[:, :, self.sinks :] += self._shift  # those of the text, as of what comes later
        self._cache = cache
        self._keep_place()

    def passes(self, text: list[int], ahead: Sequence[int] = ()) -> int:
        """How many passes, one token longer each, there are positions for after ``text`` and ``ahead``; at
        least 1."""
        if self.kv != "streaming":
            return len(text)
        return max(1, self.budget + 1 - (len(text) + len(ahead) - self._shift))

    @torch.inference_mode()
    def row(self, text: list[int], ahead: Sequence[int]) -> Tensor:
        """Logits (1, S) of what follows ``text`` and ``ahead``; draft rows that agree with them are used
        again, the others are run in one pass.

        Args:
            ahead: tokens after the text.
        """
        fresh = [*text[self._known :], *ahead]
        same = min(len(commonprefix((self._drafted, fresh))), len(fresh) - 1)
        self._cache.rewind(same)
        start = self._known + same - self._shift
        tokens = torch.tensor(fresh[same:]).clamp(max=self.model.vocab_size - 1)  # as of `begin`
        positions = torch.arange(start, start + len(tokens))
        result = self.model.forward(tokens, positions, self._cache)
        self._cache.grow(len(tokens))
        self._drafted = fresh
        return self.vocabulary.project(self.model.norm(result.hidden[-1:]))

    def catch_up(self, tokens: list[int], check: Callable[[], None] = lambda: None) -> bool:
        """Take in text that was written while this model did not draft; whether there was any. ``check`` is
        called between passes."""
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
        """Settle the draft rows that became part of the committed text (its last token is the root)."""
        kept = len(commonprefix((self._drafted, tokens[self._known : -1])))
        self._cache.settle(kept, self._known)
        self._known += kept
        self._drafted = []
        self._keep_place()

    def _keep_place(self) -> None:
        """Keep positions below the budget, and the sinks next to the window (streaming only)."""
        cache = self._cache
        if self.kv != "streaming" or cache.filled < self.slots:
            return
        if self._origin is None:
            self._origin = cache.first_keys()
        gap = self._known - self._shift - self.slots
        if gap > self.room:
            cache.turn_window(-gap, self.model.rotary_frequencies)
            self._shift += gap
            gap = 0
        if gap != self._turned:
            cache.turn_sinks(gap, self.model.rotary_frequencies, self._origin)
            self._turned = gap


class ModelDrafter(Drafter):
    """Passes of a draft model along the best path.

    Args:
        context: the draft model, over its own cache.
        target: the model that it drafts for.
        asked: the option that sets its cache's size, and the value, as errors name them.
    """

    name, mark = MODEL, "chain"

    def __init__(self, context: ModelContext, target: BaseTarget, asked: tuple[str, object]) -> None:
        self.context, self.target, self.asked = context, target, asked

    def begin(self, sequence: TokenSequence) -> None:
        """Run the prompt."""
        self.context.begin(sequence.tokens, sequence.check)

    def needs(self, text: int, row: int) -> list[Need]:
        """Its cache."""
        context = self.context
        return [Need(*self.asked, context.model.cache_bytes(context.slots + context.longest + 2))]

    def offer(self, costs: Costs) -> CostEstimate:
        """Two passes, at the target's price by the byte of weights."""
        cost = self.context.model.weight_bytes / self.target.weight_bytes
        return CostEstimate("the draft model", 2.1, 3, 2 * cost, pass_cost=cost, lead=0.6)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """A chain."""
        context, text = self.context, sequence.tokens
        candidates.loaded |= context.catch_up(text, sequence.check)
        candidates.spread(
            lambda nodes: context.row(text, candidates.path(nodes[0])),
            context.vocabulary.subset,
            places=1,
            most=context.passes(text, candidates.ahead) - 1,
        )

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Settle the draft rows that became text."""
        self.context.observe(sequence.tokens)


# ---- two levels ---------------------------------------------------------------------------------


class CheckedDrafter(Drafter):
    """A chain that another drafter wrote and the target, over its partial cache, would write itself.

    Args:
        context: the target's partial cache.
        inner: drafts for it.
        step: tokens that ``inner`` drafts at a time.
        goal: tokens of the chain, one more at most; fewer where a row of one of the two is refused or the
            tree has no room for more.
    """

    name, mark = "checked", "chain"

    def __init__(self, context: SparseContext, inner: Drafter, step: int, goal: int) -> None:
        self.context, self.inner, self.step, self.goal = context, inner, step, goal

    def needs(self, text: int, row: int) -> list[Need]:
        """Both caches."""
        return [self.context.need(), *self.inner.needs(text, row)]

    def begin(self, sequence: TokenSequence) -> None:
        """Let the inner drafter read the prompt."""
        self.inner.begin(sequence)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """The chain, in parts."""
        if sequence.newest is None:
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
        self, sequence: TokenSequence, candidates: Candidates, cache: SparseCache, chain: list[int], goal: int
    ) -> list[int]:
        """What follows the text and ``chain``: drafted, checked over the partial cache, kept as far as the
        target chooses it itself (nothing where it cannot choose)."""
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
            accepted = accept_exact(tree, logits, text, sampler, not sampler.walks, ahead=chain)
        except (RefusedRow, NoMask):  # of a draft; the text may never come there
            return []
        cache.grow(len(accepted.nodes))
        return [*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token]

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Keep both caches in step with the text."""
        self.inner.observe(sequence, outcome)
        self.context.observe(sequence, outcome.nodes)
