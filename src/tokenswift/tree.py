"""Drafted candidates in one trie, and the :class:`DraftTree` that is verified.

Tree attention (paper section 3.2; Medusa, Cai et al. 2024): one pass verifies all candidates; each
node sees the text and its own ancestors. All drafters add to the same trie, so no prefix is
verified twice. A tree of fixed widths is verified whole; adaptive drafting selects the nodes that
are worth a row of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from tokenswift.types import DraftTree, InputError

MAX_CHANCE = 0.98  # below 1, so that a child is always less likely than its parent


class CandidateTree:
    """Candidates below a root; equal prefixes share nodes. Node 0 is the root; parents precede
    children.

    Args:
        root: token id of the root, the newest token of the text.

    Attributes:
        tokens, parents, depths, sources: for each node, as in :class:`DraftTree`.
        chances: for each node, the chance that the target chooses its token given that it chose its
            parent's.
        branches: the last node of each n-gram branch.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.sources = ["target"]
        self.chances = [1.0]
        self.branches: list[int] = []
        self._below: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, source: str = "head", chance: float = 1.0) -> int:
        """Return the node of ``token`` below ``parent``, which is added unless it exists.

        Another proposal of a node raises its chance. A source other than "ngram" takes the node
        over.
        """
        key = (parent, token)
        node = self._below.get(key)
        if node is not None:
            self.chances[node] = min(MAX_CHANCE, 1.0 - (1.0 - self.chances[node]) * (1.0 - chance))
            if self.sources[node] == "ngram":
                self.sources[node] = source
            return node
        node = self._below[key] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.chances.append(min(MAX_CHANCE, chance))
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The node of ``token`` below ``parent``, or None."""
        return self._below.get((parent, token))

    def add_path(self, tokens: Sequence[int], source: str = "ngram", parent: int = 0) -> int:
        """Add a path of tokens below ``parent`` (the root by default); return its last node."""
        for token in tokens:
            parent = self.add(parent, token, source)
        if source == "ngram" and tokens:
            self.branches.append(parent)
        return parent

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to ``node``."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def path_chance(self, node: int) -> float:
        """Chance that the target chooses the whole path to ``node``."""
        chance = 1.0
        while node > 0:
            chance *= self.chances[node]
            node = self.parents[node]
        return chance

    def select(self, costs: Sequence[float], rate: float) -> tuple[list[int], float]:
        """The nodes that are worth a row, ascending, and their expected number of accepted tokens.

        With nodes sorted by path chance, parents precede children, so every prefix of that order is
        a tree. The prefix with the greatest ``sum of path chances - rate · cost`` is selected: by
        renewal theory, the one that raises the long-run rate most.

        Args:
            costs: ``costs[n]`` is the time of a pass with n nodes below the root; its length bounds
                n.
            rate: current tokens per unit of that time.
        """
        path_chances = [1.0]
        for parent, chance in zip(self.parents[1:], self.chances[1:], strict=True):
            path_chances.append(path_chances[parent] * chance)
        nodes = range(1, len(path_chances))
        likeliest = sorted(nodes, key=path_chances.__getitem__, reverse=True)[: len(costs) - 1]
        best_count = 0
        best_value = -rate * costs[0]
        best_expected = 0.0
        expected = 0.0
        for count, node in enumerate(likeliest, 1):
            expected += path_chances[node]
            value = expected - rate * costs[count]
            if value > best_value:
                best_count = count
                best_value = value
                best_expected = expected
        return sorted(likeliest[:best_count]), best_expected

    def build(self, nodes: Sequence[int] | None = None) -> DraftTree:
        """The tree to verify; its γ is its depth.

        Args:
            nodes: the nodes to keep below the root, ascending, each with its parent; None: all of
                them.
        """
        below_root = range(1, len(self)) if nodes is None else nodes
        all_nodes = [0, *below_root]
        index = {node: i for i, node in enumerate(all_nodes)}
        depths = tuple(self.depths[node] for node in all_nodes)
        return DraftTree(
            tokens=tuple(self.tokens[node] for node in all_nodes),
            parents=(-1, *(index[self.parents[node]] for node in below_root)),
            depths=depths,
            sources=tuple(self.sources[node] for node in all_nodes),
            gamma=max(depths),
            branches=tuple(self.branches) if nodes is None else (),
        )


def children(tree: DraftTree) -> list[dict[int, int]]:
    """For each node, its children as token id → node."""
    below: list[dict[int, int]] = [{} for _ in tree.tokens]
    for node in range(1, len(tree.tokens)):
        below[tree.parents[node]][tree.tokens[node]] = node
    return below


def ancestor_mask(
    parents: Sequence[int], device: torch.device | str = "cpu"
) -> Bool[Tensor, "n n"]:
    """``mask[i, j]``: node i sees node j, itself or an ancestor (``parents[i]`` is -1 for a
    root)."""
    rows: list[bytearray] = []
    for node, parent in enumerate(parents):
        row = bytearray(rows[parent]) if parent >= 0 else bytearray(len(parents))
        row[node] = 1
        rows.append(row)
    flat = torch.frombuffer(bytearray().join(rows), dtype=torch.bool)
    return flat.view(len(parents), len(parents)).to(device)


def check_tree(widths: Sequence[int], vocab_size: int) -> None:
    """Check a tree's widths against the model.

    Raises:
        InputError: a width above the vocabulary.
    """
    if max(widths) > vocab_size:
        text = ",".join(map(str, widths))
        raise InputError(f"tree is {text!r}; valid: widths up to {vocab_size}, the vocabulary size")
