"""Trees of candidates from the LM head and draft heads: the drafting that TokenSwift and Medusa share."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.drafting.chain import DraftVocabulary, draft_vocabulary
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import DraftModel, Sequence
from tokenswift.sampling import Sampler
from tokenswift.tree import TreeBuilder


def newest_hidden(sequence: Sequence) -> Tensor:
    """Hidden state (1, D) that the last verify pass left for the newest committed token.

    Raises:
        ValueError: nothing was committed yet.
    """
    if sequence.newest is None:
        raise ValueError("nothing was committed yet")
    return sequence.newest.hidden[sequence.newest_row][None]


class HeadTree:
    """Grows a tree of given widths from one hidden state.

    Args:
        model: the target.
        heads: draft heads, or None (the LM head alone).
        sampler: the target's choice rule, which coupled candidates share.
        widths: candidates per level.
        coupled: rank candidates with the target's noise.
        frequent: let the heads draft frequent tokens and the prompt's only, where they name them.
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
        self.widths, self.coupled, self.frequent = widths, coupled, frequent
        self.vocabulary = DraftVocabulary(model)

    def begin(self, tokens: list[int]) -> None:
        """Settle which tokens the heads may draft, from the prompt."""
        if self.heads is not None and self.frequent:
            self.vocabulary = draft_vocabulary(self.model, self.heads.frequent, tokens)

    def grow(self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool) -> int:
        """Add the tree below the builder's root; returns γ, its depth.

        Args:
            base: hidden state (1, D) that the heads start from.
            backbone: it is the root's own state, so the LM head drafts the first level; otherwise it is
                that of the token before the root, and the first head does.
        """
        if self.heads is not None and self.heads.conditioned:
            return self._conditioned(builder, sequence, base, backbone, self.heads)
        return self._parallel(builder, sequence, base, backbone)

    def _parallel(self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool) -> int:
        """Heads that do not look at drafted tokens: every level has one ranking, shared by all its nodes;
        its penalty window follows the best path."""
        count = min(len(self.widths) - backbone, self.heads.count if self.heads else 0)
        rows = self._parallel_logits(base, count, self.heads) if count > 0 and self.heads else None
        levels: list[list[int]] = []
        for level in range(max(count, 0) + backbone):
            head = level - backbone
            logits = self.model.logits(base) if head < 0 or rows is None else rows[head : head + 1]
            best = [candidates[0] for candidates in levels]
            levels += self._rank(sequence, logits, [best], level)
        builder.add_levels(levels)
        return len(levels)

    def _parallel_logits(self, base: Tensor, count: int, heads: Heads) -> Tensor:
        """Logits of the first ``count`` heads, (count, V), in one pass over the LM head."""
        states, state = [], base
        for head in range(count):
            state = heads.advance(head, state, base, None)
            states.append(state)
        if heads.own_lm_heads:
            return torch.cat([heads.own_logits(head, state) for head, state in enumerate(states)])
        normed = [heads.normed(head, state) for head, state in enumerate(states)]
        return self.vocabulary.project(torch.cat(normed))

    def _conditioned(
        self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool, heads: Heads
    ) -> int:
        """Heads that see the token drafted before theirs: level by level, node by node."""
        depth = min(len(self.widths), backbone + heads.count)
        nodes, paths, states = [0], [[]], base  # the frontier: node, drafted tokens above it, head state
        for level in range(depth):
            head = level - backbone
            if head < 0:
                logits = self.model.logits(base)
            else:
                last = [path[-1] if path else sequence.tokens[-1] for path in paths]
                embeds = self.model.embed(torch.tensor(last, device=self.model.device))
                states = heads.advance(head, states, base.expand(len(nodes), -1), embeds)
                logits = self.vocabulary.project(heads.normed(head, states))
            grown: list[tuple[int, list[int], int]] = []
            for row, candidates in enumerate(self._rank(sequence, logits, paths, level)):
                for token in candidates:
                    grown.append((builder.child(nodes[row], token), [*paths[row], token], row))
            nodes, paths = [node for node, _, _ in grown], [path for _, path, _ in grown]
            states = states[[row for _, _, row in grown]]
        return depth

    def _rank(
        self, sequence: Sequence, logits: Tensor, paths: list[list[int]], level: int
    ) -> list[list[int]]:
        """Candidates for ``level`` (0 is the root's child), one list per row of ``logits``."""
        position = len(sequence.tokens) + level
        count = len(paths)
        return self.sampler.rank(
            logits, sequence.tokens, paths, [position] * count, [self.widths[level]] * count, self.coupled
        )
