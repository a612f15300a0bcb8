"""Chains of drafted tokens: one token after another, from any model over any cache.

With coupled candidates (Daliri et al. 2024) the drafting model chooses with the noise that the target
will use at the same position, so it guesses right wherever both would choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenswift.cache.select import select
from tokenswift.cache.sparse import SparseCache
from tokenswift.drafters.refusal import Source, model_source
from tokenswift.drafters.vocabulary import DraftVocabulary, draft_vocabulary
from tokenswift.interfaces import DraftModel
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.ranking import Subset
from tokenswift.tree import TreeBuilder
from tokenswift.types import DraftTree


def chain_tree(root: int, tokens: list[int]) -> DraftTree:
    """The tree of a single path below ``root``."""
    builder = TreeBuilder(root)
    builder.add_path(tokens, "chain")
    return builder.build(len(tokens))


def draft_chain(
    model: DraftModel,
    vocabulary: DraftVocabulary,
    cache: SparseCache,
    source: Source,
    sampler: Sampler,
    text: list[int],
    fresh: list[int],
    position: int,
    length: int,
    coupled: bool,
) -> list[int]:
    """Draft ``length`` tokens after ``text``, a pass each (fewer where one is refused); their rows stay in
    the cache as draft rows.

    Args:
        vocabulary: what may be drafted.
        source: asks for the tokens.
        text: the committed text; read only as far as the penalty window reaches.
        cache: holds the text but its last tokens,
        fresh: which are run first, in one pass, the first at ``position``.
        coupled: choose with the target's noise.
    """
    drafted: list[int] = []
    for _ in range(length):
        tokens = torch.tensor(fresh, device=model.device)
        positions = torch.arange(position, position + len(fresh), device=model.device)
        result = model.forward(tokens, positions, cache)
        cache.grow(len(fresh))
        position += len(fresh)
        row = vocabulary.logits(result.hidden[-1:])
        token = source.best(sampler, row, text, drafted, coupled, vocabulary.subset)
        if token is None:
            break
        drafted = [*drafted, token]
        fresh = [token]
    return drafted


class ModelDrafter:
    """A standalone draft model with a sparse cache of its own.

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
        sampler: the target's choice rule.
        kv: "streaming" or "snapkv".
        budget, sinks: B and S of its cache, draft rows included (streaming) or not (snapkv).
        longest: tokens that may be drafted and run before they are committed.
        coupled: draft with the target's noise.
        frequent: token ids that may be drafted besides the prompt's; None for all.

    Attributes:
        source: whether its rows can be chosen from; once it is dropped, nothing is drafted.
    """

    def __init__(
        self,
        model: DraftModel,
        sampler: Sampler,
        kv: str,
        budget: int,
        sinks: int,
        longest: int,
        coupled: bool,
        frequent: Tensor | None = None,
    ) -> None:
        self.model, self.sampler = model, sampler
        self.kv, self.coupled = kv, coupled
        self.budget = min([budget, *(w for w in model.windows if w is not None)])
        self.slots = self.budget
        if kv == "streaming":
            spare = max(1, (self.budget - sinks) // 8) + longest + 2
            self.slots = max(1, self.budget - spare)
        self.room = max(0, self.budget - self.slots - longest - 2)
        self.sinks = min(sinks, self.slots - 1)
        self.longest = longest
        self.frequent = frequent
        self.source = model_source()
        self.vocabulary: DraftVocabulary | None = None
        self._cache: SparseCache | None = None
        self._known = 0  # tokens of the text that have slots
        self._shift = 0  # text position minus the model's position
        self._drafted: list[int] = []  # tokens of the draft rows
        self._origin: Tensor | None = None  # the sinks' keys as first written
        self._turned = 0  # positions that the sinks have moved

    @torch.inference_mode()
    def begin(self, tokens: list[int]) -> None:
        """Run the prompt, all but its last token (the first root)."""
        known = tokens[:-1]
        self.vocabulary = draft_vocabulary(self.model, self.frequent, tokens)
        run = known
        if self.kv == "streaming" and len(known) > self.slots:
            run = known[: self.sinks] + known[len(known) - (self.slots - self.sinks) :]
        self._known, self._shift = len(known), len(known) - len(run)
        full = self.model.new_cache(max(1, len(run)))
        cache = SparseCache(full, self.slots, self.sinks, self.longest + 2)
        if run:
            last = self.model.prefill(run, full)
            policy = "snapkv" if self.kv == "snapkv" else "recent"
            row, windows = len(last.hidden) - 1, self.model.windows
            cache.load(full, select(policy, full, last.queries, row, windows, self.slots, self.sinks))
            cache.positions[:, :, self.sinks :] += self._shift  # those of the text, as of what comes later
        self._cache = cache
        self._keep_place()

    def chain(self, text: list[int], length: int, ahead: Sequence[int] = ()) -> list[int]:
        """Draft ``length`` tokens (fewer where a small budget has no room, or a row is refused) after
        ``text`` and ``ahead``.

        Args:
            text: the committed text; read from the last token that has a slot on, and as far as the
                penalty window reaches.
            ahead: tokens after it that are not committed yet.
        """
        drafted: list[int] = []
        for _ in range(0 if self.source.dropped else min(length, self.passes(text, ahead))):
            path = [*ahead, *drafted]
            row = self.row(text, path)
            token = self.source.best(self.sampler, row, text, path, self.coupled, self.subset)
            if token is None:
                break
            drafted.append(token)
        return drafted

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

        Raises:
            ValueError: `begin` was not called.
        """
        if self._cache is None or self.vocabulary is None:
            raise ValueError("begin was not called")
        fresh = [*text[self._known :], *ahead]
        same = min(_common(self._drafted, fresh), len(fresh) - 1)
        self._cache.rewind(same)
        start = self._known + same - self._shift
        tokens = torch.tensor(fresh[same:], device=self.model.device)
        positions = torch.arange(start, start + len(tokens), device=self.model.device)
        result = self.model.forward(tokens, positions, self._cache)
        self._cache.grow(len(tokens))
        self._drafted = fresh
        return self.vocabulary.logits(result.hidden[-1:])

    def catch_up(self, tokens: list[int]) -> bool:
        """Take in text that was written while this model did not draft; whether there was any."""
        lagged = len(tokens) - self._known > 2  # the newest token, and one that was accepted undrafted
        if len(tokens) - self._known > 8 * self.longest:
            self.begin(tokens)
        while len(tokens) - self._known > 2:
            part = tokens[: self._known + self.longest + 1]
            self.row(part, ())
            self.observe(part)
        return lagged

    @torch.inference_mode()
    def observe(self, tokens: list[int]) -> None:
        """Settle the draft rows that became part of the committed text (its last token is the root)."""
        if self._cache is None or self.source.dropped:
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
            self._origin = cache.data[0::2, :, : self.sinks].clone()
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
