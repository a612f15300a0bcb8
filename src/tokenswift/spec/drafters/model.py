"""A draft model: a small model with the target's tokenizer, over a sparse cache of its own.

With coupled candidates (Daliri et al. 2024) it chooses with the noise that the target will use at the same
position, so it guesses right wherever both would choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenswift.kv.select import select
from tokenswift.kv.sparse import SparseCache
from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.ranking import Subset
from tokenswift.spec.control import CostEstimate, Costs
from tokenswift.spec.drafters.base import CHAIN, Drafter, Outcome
from tokenswift.spec.drafters.candidates import Candidates, DraftVocabulary, Source, draft_vocabulary
from tokenswift.spec.strategy import TokenSequence

MODEL = "model"
_LAG = 3  # tokens without slots that a step leaves at most: the newest, and two accepted undrafted


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

    def __init__(
        self,
        model: BaseTarget,
        size: int,
        kv: str,
        budget: int,
        sinks: int,
        longest: int,
        frequent: Tensor | None = None,
    ) -> None:
        self.model, self.size, self.kv = model, size, kv
        self.budget = min([budget, *(w for w in model.windows if w is not None)])
        self.slots = self.budget
        if kv == "streaming":
            spare = max(1, (self.budget - sinks) // 8) + longest + 2
            self.slots = max(1, self.budget - spare)
        self.room = max(0, self.budget - self.slots - longest - 2)
        self.sinks = min(sinks, self.slots - 1)
        self.longest = longest
        self.frequent = frequent
        self.vocabulary: DraftVocabulary | None = None
        self._cache: SparseCache | None = None
        self._known = 0  # tokens of the text that have slots
        self._shift = 0  # text position minus the model's position
        self._drafted: list[int] = []  # tokens of the draft rows; those that nobody knows yet are negative
        self._origin: Tensor | None = None  # the sinks' keys as first written
        self._turned = 0  # positions that the sinks have moved

    @torch.inference_mode()
    def begin(self, tokens: list[int], check: Callable[[], None] = lambda: None) -> None:
        """Run the prompt, all but its last token (the first root); ``check`` is called between passes."""
        last = self.model.vocab_size - 1  # it stands for tokens that the model has no row for
        known = [min(token, last) for token in tokens[:-1]]
        self.vocabulary = draft_vocabulary(self.model, self.frequent, tokens, self.size)
        run = known
        if self.kv == "streaming" and len(known) > self.slots:
            run = known[: self.sinks] + known[len(known) - (self.slots - self.sinks) :]
        self._known, self._shift = len(known), len(known) - len(run)
        full = self.model.new_cache(max(1, len(run)))
        cache = self.model.backend.partial_cache(full, self.slots, self.sinks, self.longest + 2)
        if run:
            last = self.model.prefill(run, full, lambda stage, done, total: check())
            policy = "snapkv" if self.kv == "snapkv" else "recent"
            row, windows = len(last.hidden) - 1, self.model.windows
            cache.load(full, select(policy, full, last.queries, row, windows, self.slots, self.sinks))
            cache.positions[:, :, self.sinks :] += self._shift  # those of the text, as of what comes later
        self._cache = cache
        self._keep_place()

    @property
    def subset(self) -> Subset | None:
        """The tokens that may be drafted; None for all."""
        return None if self.vocabulary is None else self.vocabulary.subset

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
        Raises:
            ValueError: `begin` was not called.
        """
        if self._cache is None or self.vocabulary is None:
            raise ValueError("begin was not called")
        fresh = [*text[self._known :], *ahead]
        same = min(_common(self._drafted, fresh), len(fresh) - 1)
        self._cache.rewind(same)
        start = self._known + same - self._shift
        tokens = torch.tensor(fresh[same:]).clamp(max=self.model.vocab_size - 1)  # as of `begin`
        positions = torch.arange(start, start + len(tokens))
        result = self.model.forward(tokens, positions, self._cache)
        self._cache.grow(len(tokens))
        self._drafted = fresh
        return self.vocabulary.logits(result.hidden[-1:])

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
        if self._cache is None:
            return
        kept = _common(self._drafted, tokens[self._known : -1])
        self._cache.settle(kept, self._known)
        self._known += kept
        self._drafted = []
        self._keep_place()

    def _keep_place(self) -> None:
        """Keep positions below the budget, and the sinks next to the window (streaming only)."""
        cache = self._cache
        if cache is None or self.kv != "streaming" or cache.filled < self.slots:
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


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class ModelDrafter(Drafter):
    """Passes of a draft model along the best path.

    Args:
        context: the draft model, over its own cache.
        target: the model that it drafts for.
        asked: the option that sets its cache's size, and the value, as errors name them.

    Attributes:
        refusals: whether its rows can be chosen from; once it is left out, nothing is drafted.
    """

    name, mark = MODEL, CHAIN

    def __init__(self, context: ModelContext, target: BaseTarget, asked: tuple[str, object]) -> None:
        self.context, self.target, self.asked = context, target, asked
        self.refusals = Source("the draft model")

    def begin(self, sequence: TokenSequence) -> None:
        """Run the prompt."""
        self.context.begin(sequence.tokens, sequence.check)

    def needs(self, text: int, row: int) -> list[Need]:
        """Its cache."""
        context = self.context
        return [Need(*self.asked, (context.slots + context.longest + 2) * context.model.kv_bytes)]

    def offer(self, costs: Costs) -> CostEstimate:
        """Two passes, at the target's price by the byte of weights."""
        cost, title = self.context.model.weight_bytes / self.target.weight_bytes, "the draft model"
        return CostEstimate(title, title, 2.1, 3, 2 * cost, pass_cost=cost, lead=0.6, given=True)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """A chain."""
        if self.refusals.dropped:
            return
        context, text = self.context, sequence.tokens
        candidates.loaded |= context.catch_up(text, sequence.check)
        most = context.passes(text, candidates.ahead)
        candidates.chain(lambda path: context.row(text, path), context.subset, most=most)

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Settle the draft rows that became text."""
        if not self.refusals.dropped:
            self.context.observe(sequence.tokens)
