"""Candidate tokens and paths → one trie → a :class:`DraftTree` with its attention mask.

Tree attention (paper section 3.2; Medusa, Cai et al. 2024): all candidates are verified in one pass,
each node seeing the text and its own ancestors. Candidates of heads and n-gram branches share one
trie, so no prefix is verified twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from tokenswift.config import MAX_NODES, tree_nodes
from tokenswift.types import DraftTree, InputError

_VALID = "auto, or integers of at least 1 separated by commas, such as 1,3,3,3"


class TreeBuilder:
    """Collects drafted tokens below a root; equal prefixes share their nodes.

    Args:
        root_token: id of the newest token of the text.
    """

    __slots__ = ("tokens", "parents", "depths", "sources", "_branches", "_children", "_level")

    def __init__(self, root_token: int) -> None:
        self.tokens = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self.sources = ["target"]
        self._branches: list[int] = []
        self._children: list[dict[int, int]] = [{}]
        self._level = [0]  # nodes of the deepest level that add_levels has made

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int, source: str = "head") -> int:
        """The node of ``token`` below the node ``parent``, made if it is not there yet.

        A node counts as an n-gram's only while nothing else has proposed it.
        """
        siblings = self._children[parent]
        node = siblings.get(token)
        if node is not None:
            if self.sources[node] == "ngram":
                self.sources[node] = source
            return node
        node = siblings[token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self._children.append({})
        return node

    def add_levels(self, levels: Sequence[Sequence[int]]) -> None:
        """Add one level of candidates after another: every node of a level gets all of the next's.

        Only nodes of this product are continued, not n-gram branches. A further call continues
        below the last level of the call before. An empty level ends the product.
        """
        for candidates in levels:
            if not candidates:
                return
            below = (self.child(parent, token) for parent in self._level for token in candidates)
            self._level = list(dict.fromkeys(below))

    def add_path(self, tokens: Sequence[int], source: str = "ngram", parent: int = 0) -> int:
        """Add a path of tokens below ``parent`` (the root by default); return its last node."""
        for token in tokens:
            parent = self.child(parent, token, source)
        if source == "ngram" and tokens:
            self._branches.append(parent)
        return parent

    def build(self, gamma: int) -> DraftTree:
        """The finished tree.

        Args:
            gamma: γ, the greatest depth that the drafter aimed at (see :class:`DraftTree`).
        """
        return DraftTree(
            tuple(self.tokens),
            tuple(self.parents),
            tuple(self.depths),
            tuple(self.sources),
            gamma,
            tuple(self._branches),
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


def parse_tree(text: str) -> tuple[int, ...] | None:
    """The widths of a tree as the command line writes them: ``1,3,3,3``; None for ``auto``.

    Raises:
        InputError: the text is neither.
    """
    if text.strip().lower() == "auto":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) for part in parts):
        raise InputError(f"tree is {text!r}; valid: {_VALID}")
    return tuple(map(int, parts))


def check_tree(widths: Sequence[int], vocab_size: int) -> None:
    """Check a tree's widths against the model.

    Raises:
        InputError: a width below 1 or above the vocabulary, or more than 4,096 nodes in all.
    """
    text = ",".join(map(str, widths))
    if not widths or min(widths) < 1:
        raise InputError(f"tree is {text!r}; valid: {_VALID}")
    if max(widths) > vocab_size:
        raise InputError(f"tree is {text!r}; valid: widths up to {vocab_size}, the vocabulary size")
    if len(widths) > MAX_NODES or tree_nodes(widths) > MAX_NODES:
        raise InputError(f"tree is {text!r}; valid: at most {MAX_NODES} nodes in all, the root included")
