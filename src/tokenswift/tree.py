"""Candidate tokens and paths → one trie → a :class:`DraftTree` with its attention mask.

Tree attention (paper section 3.2; Medusa, Cai et al. 2024): all candidates are verified in one pass,
each node seeing the text and its own ancestors. Candidates of heads and n-gram branches share one
trie, so no prefix is verified twice. Trees of fixed widths are built whole; of candidates with chances,
adaptive drafting takes the part that is worth its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from tokenswift.types import DraftTree, InputError

_SURE = 0.98  # no candidate counts as more certain than this


class CandidateTree:
    """Candidates below a root; equal prefixes share their nodes. Node 0 is the root, and parents stand before
    their children.

    Args:
        root: id of the newest token of the text.

    Attributes:
        tokens, parents, depths, sources: of each node, as in :class:`DraftTree`.
        given: chance that the target chooses the node's token, given that it chose its parent's; at most
            0.98, also of what nobody gave a chance.
        branches: the last node of each n-gram branch.
    """

    __slots__ = ("tokens", "parents", "depths", "sources", "given", "branches", "_below")

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.sources, self.given = ["target"], [1.0]
        self.branches: list[int] = []
        self._below: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, source: str = "head", chance: float = 1.0) -> int:
        """The node of ``token`` below the node ``parent``, made if it is not there yet.

        What two sources propose is likelier. A node counts as an n-gram's only while nothing else has
        proposed it.
        """
        key = (parent, token)
        node = self._below.get(key)
        if node is not None:
            self.given[node] = min(_SURE, 1.0 - (1.0 - self.given[node]) * (1.0 - chance))
            if self.sources[node] == "ngram":
                self.sources[node] = source
            return node
        node = self._below[key] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.given.append(min(_SURE, chance))
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The node of ``token`` below ``parent``; None where there is none."""
        return self._below.get((parent, token))

    def add_path(self, tokens: Sequence[int], source: str = "ngram", parent: int = 0) -> int:
        """Add a path of tokens below ``parent`` (the root by default); return its last node."""
        for token in tokens:
            parent = self.add(parent, token, source)
        if source == "ngram" and tokens:
            self.branches.append(parent)
        return parent

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to ``node``."""
        made: list[int] = []
        while node > 0:
            made.append(self.tokens[node])
            node = self.parents[node]
        return made[::-1]

    def chance(self, node: int) -> float:
        """Chance that the whole path to ``node`` is the target's choice."""
        found = 1.0
        while node > 0:
            found *= self.given[node]
            node = self.parents[node]
        return found

    def select(self, costs: Sequence[float], rate: float) -> tuple[list[int], float]:
        """The nodes that are worth their rows, in order of their numbers, and the sum of their chances.

        Likelier nodes come first, which keeps parents before children; of these prefixes the one with the
        greatest ``sum of chances - rate · cost`` is taken: what a renewal process with that long-run rate
        gains most by.

        Args:
            costs: ``costs[n]`` is the time of a pass with n nodes below the root; it bounds n.
            rate: tokens per unit of that time that decoding yields now.
        """
        chances = [1.0]
        for parent, given in zip(self.parents[1:], self.given[1:], strict=True):
            chances.append(chances[parent] * given)
        order = sorted(range(1, len(chances)), key=chances.__getitem__, reverse=True)[: len(costs) - 1]
        best, most, total, expected = 0, -rate * costs[0], 0.0, 0.0
        for count, node in enumerate(order, 1):
            total += chances[node]
            value = total - rate * costs[count]
            if value > most:
                best, most, expected = count, value, total
        return sorted(order[:best]), expected

    def build(self, nodes: Sequence[int] | None = None) -> DraftTree:
        """The finished tree, γ its depth.

        Args:
            nodes: what is kept below the root (closed under parents, ascending); None: all of it, and the
                branches.
        """
        below = range(1, len(self)) if nodes is None else nodes
        kept = [0, *below]
        place = {node: i for i, node in enumerate(kept)}
        depths = tuple(self.depths[node] for node in kept)
        return DraftTree(
            tokens=tuple(self.tokens[node] for node in kept),
            parents=(-1, *(place[self.parents[node]] for node in below)),
            depths=depths,
            sources=tuple(self.sources[node] for node in kept),
            gamma=max(depths),
            branches=tuple(self.branches) if nodes is None else (),
        )


def children(tree: DraftTree) -> list[dict[int, int]]:
    """For each node, its children as token id → node."""
    below: list[dict[int, int]] = [{} for _ in tree.tokens]
    for node in range(1, len(tree.tokens)):
        below[tree.parents[node]][tree.tokens[node]] = node
    return below


def published_paths(tree: DraftTree) -> list[list[int]]:
    """The candidate paths of a tree as the published code lists them, nodes from the root on.

    First the paths of the heads' tree: the deepest first, and of equal depth the worst ranked first
    (the order in which a builder made the nodes of a level is their rank). Then every n-gram branch in
    the order of drafting, also one that repeats another path or is a part of it. The bare root is its
    own only path.
    """
    heads = [node for node in range(1, len(tree)) if tree.sources[node] != "ngram"]
    inner = {tree.parents[node] for node in heads}
    leaves = [node for node in heads if node not in inner]
    leaves.sort(key=lambda node: (tree.depths[node], node), reverse=True)
    return [[0, *tree.path(node)] for node in [*leaves, *tree.branches]] or [[0]]


def ancestor_mask(parents: Sequence[int], device: torch.device | str = "cpu") -> Bool[Tensor, "n n"]:
    """``mask[i, j]``: node j is node i or one of its ancestors (``parents[i]``, -1 for a root)."""
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
