"""The acceptance rule of the paper's published code (arXiv 2502.18890).

A target token is drawn independently for every candidate path, and the longest match is kept. **It
is not lossless**: with m paths through a token of probability p, that token is accepted with
probability 1 - (1-p)^m. It is here for reproduction, and as the negative control of the statistical
tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.sampling.noise import noise_bits, uniforms_
from tokenswift.sampling.sampler import Sampler, finite_or_raise
from tokenswift.speculation.accept import EXACT, AcceptanceRule
from tokenswift.types import Accepted, DraftTree

_PUBLISHED = 0x7075626C69736864  # keeps the published rule's draws apart from the keyed noise


def published_paths(tree: DraftTree) -> list[list[int]]:
    """The candidate paths of a tree in the published code's order, as nodes from the root on.

    First the paths of the heads' tree: the deepest first, and at equal depth the lowest ranked
    first (nodes of a level were added by rank). Then every n-gram branch in the order of drafting,
    even one that repeats another path or a part of it. A tree of the root alone has one path, the
    root.
    """
    heads = [node for node in range(1, len(tree)) if tree.sources[node] != "ngram"]
    inner = {tree.parents[node] for node in heads}
    leaves = [node for node in heads if node not in inner]
    leaves.sort(key=lambda node: (tree.depths[node], node), reverse=True)
    return [[0, *tree.path(node)] for node in [*leaves, *tree.branches]] or [[0]]


def accept_published(
    tree: DraftTree, logits: Float[Tensor, "n V"], history: list[int], sampler: Sampler
) -> Accepted:
    """The published code's rule: **not lossless**, except with ``greedy`` and no penalty.

    Each candidate path (see `published_paths`) gets independent draws of the target's token at its
    nodes, even where it shares a prefix with another or repeats it. The path that agrees longest
    with its own draws wins; of tied paths the first or the last, each half of the time, never one
    between. The winner's draw at its first disagreement, or after its end, is the target's own
    token. As in that code, the penalty window is the root's at every depth. Draws are a pure
    function of (seed, position, path), the choice among tied paths of (seed, position).

    Args:
        logits: the target's float32 logits, one row for each node.
        history: all tokens so far; the last one is the tree's root.
        sampler: processors and seed.

    Raises:
        RunError: a row that a token was drawn from holds NaN or an infinite maximum. Rows behind a
            path's first disagreement may hold anything.
    """
    paths = published_paths(tree)
    tied = list(range(len(paths)))  # the paths that agree longest so far
    depth = 0
    while True:
        nodes = [paths[i][depth] for i in tied]
        drawn = _draws(logits, nodes, tied, history, len(history) + depth, sampler)
        longer = []
        for path, token in zip(tied, drawn, strict=True):
            next_node = paths[path][depth + 1 : depth + 2]
            if next_node and tree.tokens[next_node[0]] == token:
                longer.append(path)
        if not longer:
            break
        tied = longer
        depth += 1
    no_path = torch.tensor([-1])
    bits = noise_bits(sampler.params.seed ^ _PUBLISHED, len(history), no_path)
    winner = 0 if uniforms_(bits)[0] < 0.5 else -1  # of tied paths the first or the last
    return Accepted(tuple(paths[tied[winner]][: depth + 1]), drawn[winner])


def _draws(
    logits: Float[Tensor, "n V"],
    nodes: list[int],
    paths: list[int],
    history: list[int],
    position: int,
    sampler: Sampler,
) -> list[int]:
    """A token for each path, drawn at its node by inverting the node's cumulative distribution.

    Args:
        nodes: the current node of each path.
        paths: the number of each path.
        position: the position of the tokens to draw.
    """
    rows = sorted(set(nodes))
    scores = sampler.scores(logits[rows], history, [[]] * len(rows))
    best, greedy = scores.max(-1)
    finite_or_raise(best, scores, position)
    if sampler.params.greedy:
        tokens = dict(zip(rows, greedy.tolist(), strict=True))
        return [tokens[node] for node in nodes]
    mass = scores.to(torch.float64).softmax(-1).cumsum(-1)
    numbers = torch.tensor(paths, device=scores.device)
    uniform = uniforms_(noise_bits(sampler.params.seed ^ _PUBLISHED, position, numbers))
    drawn = torch.zeros_like(numbers)
    for row, node in enumerate(rows):
        at_node = [i for i, other in enumerate(nodes) if other == node]
        indices = torch.tensor(at_node, device=scores.device)
        # the first token whose cumulative mass exceeds the draw has positive mass itself
        draws = uniform[indices] * mass[row, -1]
        drawn[indices] = torch.searchsorted(mass[row], draws, right=True)
    return drawn.clamp_(max=scores.shape[-1] - 1).tolist()


PUBLISHED = AcceptanceRule("published", accept_published, is_exact=False)


def rule_of(acceptance: str) -> AcceptanceRule:
    """The rule that the option ``acceptance`` of some methods names: "exact" or "published"."""
    return {rule.name: rule for rule in (EXACT, PUBLISHED)}[acceptance]
