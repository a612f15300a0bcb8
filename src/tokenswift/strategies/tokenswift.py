"""TokenSwift (paper section 3): heads over a partial-cache pass, n-grams of the text, one tree.

Where a step's draft starts from:

- ``partial``: one pass of the model over the root with the partial cache. The LM head (the *backbone*)
  drafts depth 1, head i drafts depth i + 1.
- ``hidden``: the hidden state that the last verify pass left for the newest committed token. No extra
  pass; head i drafts depth i.
- ``auto``: ``partial`` once the text is longer than the budget *and* its keys and values outweigh the
  model's weights (before that a draft pass costs about what a plain step costs); ``hidden`` until then.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from tokenswift.cache.full import FullCache
from tokenswift.cache.partial import PartialCache
from tokenswift.config import TokenSwiftOptions
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import KVCache, Sequence, TargetModel
from tokenswift.ngram import NgramTable
from tokenswift.sampling import Sampler
from tokenswift.tree import TreeBuilder, check_tree, tree_nodes
from tokenswift.types import DraftTree, Step

NGRAM = 4


class Drafter(TargetModel, Protocol):
    """What drafting needs of the model beyond verification."""

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer; None where it sees everything."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per cached token."""
        ...

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows (m, D) of the LM head for token ids (m,)."""
        ...


class TokenSwift:
    """The paper's method under the exact acceptance rule.

    Args:
        options: `config.TokenSwiftOptions`, with ``tree`` and ``ngrams`` resolved (not None).
        model: the target.
        heads: draft heads, or None (backbone and n-grams only).
        sampler: the target's choice rule, shared for coupled candidates.
    Raises:
        InputError: for tree widths above the vocabulary, or too many nodes.
    """

    name = "tokenswift"

    def __init__(
        self, options: TokenSwiftOptions, model: Drafter, heads: Heads | None, sampler: Sampler
    ) -> None:
        if options.tree is None or options.ngrams is None:
            raise ValueError("tree and ngrams must be resolved before the strategy is built")
        check_tree(options.tree, model.vocab_size)
        self.options = options
        self.acceptance = options.acceptance
        self.tree: tuple[int, ...] = options.tree
        self.ngrams: int = options.ngrams
        self.model = model
        self.heads = heads
        self.sampler = sampler
        self.coupled = options.candidates == "coupled"
        self.table = NgramTable(delay=sampler.params.window, length=NGRAM)
        self.partial: PartialCache | None = None
        self.frozen = False
        self.drafted: Tensor | None = None  # token ids that heads may draft; None: all
        self.head_rows: Tensor | None = None  # their rows of the LM head

    @property
    def max_nodes(self) -> int:
        """Upper bound of the tree's nodes, for the cache's scratch room."""
        return tree_nodes(self.tree) + self.ngrams * NGRAM

    def begin(self, sequence: Sequence) -> None:
        """Load the prompt into the n-gram table and settle which tokens the heads may draft."""
        self.table.extend(sequence.tokens)
        frequent = None if self.heads is None else self.heads.frequent
        if frequent is not None and self.options.vocabulary == "frequent":
            ids = torch.cat([frequent.cpu(), torch.tensor(sequence.tokens)]).unique()
            ids = ids.to(self.model.device)
            self.drafted, self.head_rows = ids, self.model.head_rows(ids)

    def draft(self, sequence: Sequence) -> DraftTree:
        """The step's tree (paper Algorithm 1, lines 4 to 7)."""
        root = sequence.tokens[-1]
        builder = TreeBuilder(root)
        backbone = self._uses_partial(sequence)
        gamma, prefix = 0, []
        if backbone or (self.heads is not None and sequence.newest is not None):
            base = self._partial_pass(sequence) if backbone else self._newest_hidden(sequence)
            conditioned = self.heads is not None and self.heads.conditioned
            grow = self._grow_conditioned if conditioned else self._grow_linear
            gamma = grow(builder, sequence, base, backbone)
            prefix = [builder.tokens[1]] if backbone else []  # the backbone's best token
        for followers in self._branches(sequence, prefix[0] if prefix else root, len(prefix)):
            builder.add_path([*prefix, *followers])
            gamma = max(gamma, len(prefix) + len(followers))
        return builder.build(gamma)

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Feed the n-gram table and the partial cache."""
        self.table.extend(list(step.token_ids))
        if self.partial is not None and not self.frozen:
            total = sequence.cache.length
            self.partial.append(total - len(nodes), total)

    # ---- where the draft comes from -------------------------------------------------------------

    def _uses_partial(self, sequence: Sequence) -> bool:
        mode, total = self.options.draft, sequence.cache.length
        if mode == "hidden" or sequence.newest is None:
            return False
        if mode == "partial":
            return True
        return total > self.options.budget and total * self.model.kv_bytes > self.model.weight_bytes

    def _partial_pass(self, sequence: Sequence) -> Tensor:
        """Run the root over the partial cache; its hidden state (1, D)."""
        root = torch.tensor(sequence.tokens[-1:], device=self.model.device)
        position = torch.tensor([len(sequence.tokens) - 1], device=self.model.device)
        result = self.model.forward(root, position, self._draft_cache(sequence))
        sequence.draft_passes += 1
        return result.hidden

    def _newest_hidden(self, sequence: Sequence) -> Tensor:
        """Hidden state (1, D) of the newest committed token."""
        if sequence.newest is None:
            raise ValueError("nothing was committed yet")
        return sequence.newest.hidden[sequence.newest_row][None]

    def _draft_cache(self, sequence: Sequence) -> KVCache:
        full = sequence.cache
        # While everything fits the budget, the full cache is the partial cache.
        if self.options.cache == "full" or full.length < self.options.budget:
            return full
        newest = sequence.newest
        if not isinstance(full, FullCache) or newest is None:
            raise ValueError("a partial cache is selected from a full cache that holds tokens")
        if self.partial is None:
            self.partial = PartialCache(full, self.options.budget, self.options.sinks, 1, self.model.windows)
            self.partial.select(newest.queries, sequence.newest_row)
            self.frozen = self.options.cache == "partial"
        elif self.partial.exhausted and not self.frozen:
            self.partial.select(newest.queries, sequence.newest_row)
        return self.partial

    # ---- candidates -----------------------------------------------------------------------------

    def _grow_linear(self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool) -> int:
        """Candidates of the backbone and of heads that do not look at drafted tokens; returns γ.

        Every level has one ranking, shared by all its nodes; its penalty window follows the best path.
        """
        heads = min(len(self.tree) - backbone, self.heads.count if self.heads else 0)
        rows = self._linear_logits(base, heads) if heads > 0 else None
        levels: list[list[int]] = []
        for level in range(heads + backbone):
            head = level - backbone
            logits = self.model.logits(base) if head < 0 or rows is None else rows[head : head + 1]
            best = [candidates[0] for candidates in levels]
            levels += self._rank(sequence, logits, [best], level)
        builder.add_levels(levels)
        return len(levels)

    def _grow_conditioned(
        self, builder: TreeBuilder, sequence: Sequence, base: Tensor, backbone: bool
    ) -> int:
        """The same for heads that see the token drafted before theirs: level by level, node by node."""
        if self.heads is None:
            raise ValueError("no heads")
        depth = min(len(self.tree), backbone + self.heads.count)
        nodes, paths, states = [0], [[]], base  # the frontier: node, drafted tokens above it, head state
        for level in range(depth):
            head = level - backbone
            if head < 0:
                logits = self.model.logits(base)
            else:
                last = [path[-1] if path else sequence.tokens[-1] for path in paths]
                embeds = self.model.embed(torch.tensor(last, device=self.model.device))
                states = self.heads.advance(head, states, base.expand(len(nodes), -1), embeds)
                logits = self._project(self.heads.normed(head, states))
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
            logits, sequence.tokens, paths, [position] * count, [self.tree[level]] * count, self.coupled
        )

    def _linear_logits(self, base: Tensor, count: int) -> Tensor:
        """Logits of the first ``count`` unconditioned heads, (count, V), in one pass over the LM head."""
        if self.heads is None:
            raise ValueError("no heads")
        states, state = [], base
        for head in range(count):
            state = self.heads.advance(head, state, base, None)
            states.append(state)
        if self.heads.own_lm_heads:
            return torch.cat([self.heads.own_logits(head, state) for head, state in enumerate(states)])
        normed = [self.heads.normed(head, state) for head, state in enumerate(states)]
        return self._project(torch.cat(normed))

    def _project(self, normed: Tensor) -> Tensor:
        """The LM head over the tokens that heads may draft, (m, D) → (m, V); -inf for the others."""
        if self.drafted is None or self.head_rows is None:
            return self.model.project(normed)
        logits = normed.new_full((len(normed), self.model.vocab_size), -torch.inf, dtype=torch.float32)
        logits[:, self.drafted] = self.model.project(normed, self.head_rows)
        return logits

    def _branches(self, sequence: Sequence, start: int, offset: int) -> list[tuple[int, ...]]:
        """The best n-gram branches after token ``start``, which stands ``offset`` places after the root."""
        if not self.ngrams:
            return []
        pool = 4 * self.ngrams if self.coupled and not self.sampler.params.greedy else self.ngrams
        least = self.options.ngram_count or 1
        found = [entry for entry in self.table.lookup(start, pool) if entry[1] >= least]
        if len(found) <= self.ngrams:
            return [followers for followers, _ in found]
        grams = torch.tensor([followers for followers, _ in found], device=self.model.device)
        score = torch.tensor([math.log(count) for _, count in found], device=self.model.device)
        for i in range(grams.shape[1]):
            score = score + self.sampler.noise.gather(len(sequence.tokens) + offset + i, grams[:, i])
        best = score.topk(self.ngrams).indices.tolist()
        return [found[i][0] for i in best]
