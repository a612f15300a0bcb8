"""Drafts by passes of a draft model over a small KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

import torch
from torch import Tensor

from tokenswift.kv.sparse import SparseCache, select
from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.drafters.base import Candidates, Drafter, DraftVocabulary, Outcome
from tokenswift.speculation.sequence_state import SequenceState

MODEL = "model"
# tokens that a step leaves unknown to a draft model at most: the root, and two it did not draft
_LAG = 3


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
        budget: B in tokens, which includes draft rows with "streaming".
        sinks: S in tokens.
        longest: tokens drafted in a step at most.
        frequent: token ids that may be drafted besides the prompt's; None: all.

    Attributes:
        slots: tokens that the cache holds.
        room: positions through which the window moves until its keys are rotated back.
        vocabulary: tokens that may be drafted.
    """

    model: BaseTarget
    size: int
    kv: str
    budget: int
    sinks: int
    longest: int
    frequent: Tensor | None = None
    slots: int = field(init=False)
    room: int = field(init=False)
    vocabulary: DraftVocabulary = field(init=False)
    _cache: SparseCache | None = field(init=False, default=None)  # None before the prefill
    _drafted: list[int] = field(init=False, default_factory=list)  # tokens of the draft rows
    # committed tokens that the model has run
    _known: int = field(init=False, default=0)
    # a token's position in the sequence minus its position in the model
    _shift: int = field(init=False, default=0)
    # the sinks' keys as first written, (layers, K, S, d)
    _origin: Tensor | None = field(init=False, default=None)
    # positions that the sinks' keys have been rotated by
    _sinks_turned: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.budget = min([self.budget, *(w for w in self.model.windows if w is not None)])
        self.slots = self.budget
        if self.kv == "streaming":
            spare = max(1, (self.budget - self.sinks) // 8) + self.longest + 2
            self.slots = max(1, self.budget - spare)
        self.room = max(0, self.budget - self.slots - self.longest - 2)
        self.sinks = min(self.sinks, self.slots - 1)
        self.vocabulary = DraftVocabulary(self.model, self.size)

    @torch.inference_mode()
    def begin(self, tokens: list[int], check: Callable[[], None] = lambda: None) -> None:
        """Prefill all tokens but the last (the root); ``check`` is called between passes."""
        last = self.model.vocab_size - 1  # stands in for tokens that the model does not have
        known = [min(token, last) for token in tokens[:-1]]
        self.vocabulary = DraftVocabulary(self.model, self.size, self.frequent, tokens)
        run = known
        if self.kv == "streaming" and len(known) > self.slots:
            run = known[: self.sinks] + known[len(known) - (self.slots - self.sinks) :]
        self._known = len(known)
        self._shift = len(known) - len(run)
        self._cache = self._prefilled(run, check)
        self._rotate()

    @property
    def cache(self) -> SparseCache:
        """The model's cache.

        Raises:
            ValueError: nothing was prefilled yet.
        """
        if self._cache is None:
            raise ValueError("a draft model drafts after its prefill; call `begin` first")
        return self._cache

    def _prefilled(self, tokens: list[int], check: Callable[[], None]) -> SparseCache:
        """A cache with what the policy selects of these tokens."""
        is_long = self.model.rotary.is_long(len(tokens))
        full = self.model.new_cache(max(1, len(tokens)), keep_all=True, is_long=is_long)
        cache = SparseCache(full, self.slots, self.sinks, self.longest + 2)
        if tokens:
            last = self.model.prefill(tokens, full, lambda stage, done, total: check())
            positions = select(
                "snapkv" if self.kv == "snapkv" else "recent",
                full,
                last.queries,
                len(last.hidden) - 1,
                windows=self.model.windows,
                budget=self.slots,
                sinks=self.sinks,
            )
            cache.load(full, positions)
            cache.positions[:, :, self.sinks :] += self._shift  # positions in the sequence
        return cache

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
        self.cache.rewind(same)
        start = self._known + same - self._shift
        tokens = torch.tensor(fresh[same:]).clamp(max=self.model.vocab_size - 1)  # see `begin`
        positions = torch.arange(start, start + len(tokens))
        result = self.model.forward(tokens, positions, self.cache)
        self.cache.grow(len(tokens))
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
        accepted = len(commonprefix((self._drafted, tokens[self._known : -1])))
        self.cache.commit_drafted(accepted, self._known)
        self._known += accepted
        self._drafted = []
        self._rotate()

    def _rotate(self) -> None:
        """Keep positions below the budget, and the sinks next to the window (streaming only)."""
        cache = self.cache
        if self.kv != "streaming" or cache.filled < self.slots:
            return
        if self._origin is None:
            self._origin = cache.entries.keys(slice(None), 0, cache.sinks).clone()
        gap = self._known - self._shift - self.slots
        if gap > self.room:
            cache.turn_window(-gap, self.model.rotary.single(cache.is_long))
            self._shift += gap
            gap = 0
        if gap != self._sinks_turned:
            cache.turn_sinks(gap, self.model.rotary.single(cache.is_long), self._origin)
            self._sinks_turned = gap


class ModelDrafter(Drafter):
    """Drafts a chain by passes of a draft model.

    Args:
        context: the draft model with its cache.
        target: the model that it drafts for.
        option: name and value of the option that sets its cache's size, for errors.
    """

    name = MODEL
    source = "chain"

    def __init__(
        self, context: ModelContext, target: BaseTarget, option: tuple[str, object]
    ) -> None:
        self.context = context
        self.target = target
        self.option = option

    def begin(self, sequence: SequenceState) -> None:
        """Prefill the draft model."""
        self.context.begin(sequence.tokens, sequence.raise_if_cancelled)

    def needs(self, text: int, row: int) -> list[Need]:
        """The draft model's cache."""
        context = self.context
        size = context.model.cache_bytes(context.slots + context.longest + 2)
        return [Need(*self.option, size)]

    def estimate(self, costs: Costs) -> CostEstimate:
        """Two passes, with costs in proportion to the bytes of weights."""
        cost = self.context.model.weight_bytes / self.target.weight_bytes
        return CostEstimate(
            "the draft model",
            tokens=2.1,
            rows=3,
            draft_cost=2 * cost,
            pass_cost=cost,
            best_chance=0.6,
        )

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """A chain."""
        context = self.context
        text = sequence.tokens
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
