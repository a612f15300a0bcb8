"""Trees of candidates from the LM head and draft heads: the drafting that TokenSwift and Medusa share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.drafters.refusal import heads_source, pass_source
from tokenswift.drafters.vocabulary import DraftVocabulary, draft_vocabulary
from tokenswift.heads.modules import Heads
from tokenswift.heads.packed import packed_steps
from tokenswift.interfaces import DraftModel, Sequence
from tokenswift.sampling.choice import RefusedRow, Sampler, Subset
from tokenswift.tree import TreeBuilder


def newest_hidden(sequence: Sequence) -> Tensor:
    """Hidden state (1, D) that the last verify pass left for the newest committed token.

    Raises:
        ValueError: nothing was committed yet.
    """
    if sequence.newest is None:
        raise ValueError("nothing was committed yet")
    return sequence.newest.hidden[sequence.newest_row][None]


class HeadLevels:
    """The heads' logits, level by level.

    Args:
        model: the target.
        heads: draft heads.
        frequent: let them draft frequent tokens and the prompt's only, where they name them.
    """

    def __init__(self, model: DraftModel, heads: Heads, frequent: bool) -> None:
        self.model, self.heads, self.frequent = model, heads, frequent
        self.vocabulary = DraftVocabulary(model)
        self._steps = packed_steps(heads, model.backend)
        self._base = torch.empty(0)
        self._shares: dict[int, Tensor] = {}

    def begin(self, tokens: list[int]) -> None:
        """Settle which tokens may be drafted, from the prompt."""
        if self.frequent and not self.heads.own_lm_heads:
            self.vocabulary = draft_vocabulary(self.model, self.heads.frequent, tokens)

    @property
    def subset(self) -> Subset | None:
        """The tokens that the columns of logits stand for; None for all."""
        return self.vocabulary.subset

    def start(self, base: Tensor) -> Tensor:
        """Take the hidden state (1, D) that the next levels start from; it is the first head's `states`."""
        self._base = base
        self._shares = {}
        return base

    def level(self, head: int, states: Tensor, last: list[int]) -> tuple[Tensor, Tensor]:
        """States (m, D) and logits (m, S) of a head, from those of the head before it.

        Args:
            head: counted from 0.
            last: the token before the one that the head predicts, for each row.
        """
        heads = self.heads
        if self._steps is None:
            embeds = self._embeds(last) if heads.conditioned else None
            states = heads.advance(head, states, self._base.expand(len(states), -1), embeds)
            if heads.own_lm_heads:
                return states, heads.own_logits(head, states)
            return states, self.vocabulary.project(heads.normed(head, states))
        which = min(head, len(self._steps) - 1)
        step = self._steps[which]
        if which not in self._shares:
            self._shares[which] = step.begin(self._base)
        states = step.level(states, self._shares[which], self._embeds(last), head == 0)
        return states, self.vocabulary.project(states)

    def _embeds(self, tokens: list[int]) -> Tensor:
        return self.model.embed(torch.tensor(tokens, device=self.model.device))


def level_of(model: DraftModel, heads: Heads | None) -> Callable[[], object] | None:
    """A call that evaluates one level for one row and ranks it, to be timed; None without heads."""
    if heads is None:
        return None
    levels = HeadLevels(model, heads, frequent=True)
    levels.begin([0])
    sampler = model.sampler(SamplingParams())
    states = levels.start(torch.zeros(1, heads.config.hidden_size, device=model.device))

    def level() -> object:
        logits = levels.level(0, states, [0])[1]
        with suppress(RefusedRow):  # a run that meets one drafts nothing there
            return sampler.candidates(logits, [0], [[]], [1], [4], True, levels.subset)

    return level


class HeadTree:
    """Grows a tree of given widths from one hidden state.

    Args:
        model: the target.
        heads: draft heads, or None (the LM head alone).
        sampler: the target's choice rule, which coupled candidates share.
        widths: candidates per level.
        coupled: rank candidates with the target's noise.
        frequent: let the heads draft frequent tokens and the prompt's only, where they name them.

    Attributes:
        source, backbone: whether rows of the heads, and of the LM head, can be chosen from; heads that were
            dropped draft nothing, and a level that was refused ends the tree.
    """

    def __init__(
        self,
        model: DraftModel,
        heads: Heads | None,
        sampler: Sampler,
        widths: tuple[int, ...],
        coupled: bool,
        frequent: bool,
    ) -> None:
        self.model, self.heads, self.sampler = model, heads, sampler
        self.widths, self.coupled = widths, coupled
        self.levels = None if heads is None else HeadLevels(model, heads, frequent)
        self.source, self.backbone = heads_source("" if heads is None else heads.source), pass_source()

    def begin(self, tokens: list[int]) -> None:
        """Settle which tokens the heads may draft, from the prompt."""
        if self.levels is not None:
            self.levels.begin(tokens)

    def grow(self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool) -> int:
        """Add the tree below the builder's root; returns γ, its depth.

        Args:
            base: hidden state (1, D) that the heads start from.
            backbone: it is the root's own state, so the LM head drafts the first level; otherwise it is
                that of the token before the root, and the first head does.
        """
        heads = 0 if self.heads is None or self.source.dropped else self.heads.count
        depth = min(len(self.widths), backbone + heads)
        if self.heads is not None and self.heads.conditioned:
            return self._conditioned(builder, sequence, base, backbone, depth)
        return self._parallel(builder, sequence, base, backbone, depth)

    def _parallel(
        self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool, depth: int
    ) -> int:
        """Heads that do not look at drafted tokens: every level has one ranking, shared by all its nodes;
        its penalty window follows the best path."""
        states = base if self.levels is None else self.levels.start(base)
        levels: list[list[int]] = []
        for level in range(depth):
            best = [candidates[0] for candidates in levels]
            head = level - backbone
            states, logits, subset = self._logits(head, states, [0])
            ranked = self._rank(sequence, logits, [best], level, subset, head)
            if not ranked[0]:
                break
            levels += ranked
        builder.add_levels(levels)
        return len(levels)

    def _conditioned(
        self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool, depth: int
    ) -> int:
        """Heads that see the token drafted before theirs: level by level, node by node."""
        states = base if self.levels is None else self.levels.start(base)
        nodes, paths = [0], [[]]  # the frontier: node, drafted tokens above it
        for level in range(depth):
            last = [path[-1] if path else sequence.tokens[-1] for path in paths]
            head = level - backbone
            states, logits, subset = self._logits(head, states, last)
            grown: list[tuple[int, list[int], int]] = []
            for row, candidates in enumerate(self._rank(sequence, logits, paths, level, subset, head)):
                for token in candidates:
                    grown.append((builder.child(nodes[row], token), [*paths[row], token], row))
            if not grown:
                return level
            nodes, paths = [node for node, _, _ in grown], [path for _, path, _ in grown]
            states = states[[row for _, _, row in grown]]
        return depth

    def _logits(self, head: int, states: Tensor, last: list[int]) -> tuple[Tensor, Tensor, Subset | None]:
        """A head's states and logits, and what the columns stand for; head -1 is the LM head."""
        if head < 0 or self.levels is None:
            return states, self.model.logits(states), None
        states, logits = self.levels.level(head, states, last)
        return states, logits, self.levels.subset

    def _rank(
        self,
        sequence: Sequence,
        logits: Tensor,
        paths: list[list[int]],
        level: int,
        subset: Subset | None,
        head: int,
    ) -> list[list[int]]:
        """Candidates for ``level`` (0 is the root's child), one list per row of a ``head``'s logits."""
        positions, widths = [len(sequence.tokens) + level] * len(paths), [self.widths[level]] * len(paths)
        source = self.backbone if head < 0 else self.source
        return source.rank(
            self.sampler, logits, sequence.tokens, paths, positions, widths, self.coupled, subset
        )
