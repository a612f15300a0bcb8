"""Which drafted tokens are kept: the exact rule, and the rule of the paper's published code.

*Exact* (this project): one target choice per node, with noise keyed by the position, and a walk from
the root along the choices. Autoregressive decoding makes the same choices, so for one seed every
drafter and every tree yields the very same tokens.

*Published* (the code of arXiv 2502.18890): a target token is drawn independently for every candidate
path, and the longest match is kept. **It is not lossless**: with m leaves below a token of
probability p, that token is accepted with probability 1 - (1-p)^m. It is here for reproduction and
as the negative control of the statistical tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.interfaces import Chooser
from tokenswift.noise import noise_bits, uniforms_
from tokenswift.sampling import Sampler, finite_or_raise
from tokenswift.tree import children
from tokenswift.types import Accepted, DraftTree

_PUBLISHED = 0x7075626C69736864  # keeps the published rule's draws apart from the keyed noise


def accept_exact(
    tree: DraftTree,
    logits: Float[Tensor, "n V"],
    history: list[int],
    sampler: Chooser,
    all_rows: bool = False,
) -> Accepted:
    """Walk from the root along the target's own choices; exact for every tree.

    Args:
        logits: the target's float32 logits, one row for each node of the tree.
        history: the whole text so far; its last token is the tree's root.
        sampler: the choice rule.
        all_rows: choose for all nodes in one call (an accelerator, where a call costs more than
            its rows) instead of only for the nodes on the walk (the CPU).

    Raises:
        RunError: a row that was looked at holds NaN or an infinite maximum.
    """
    below = children(tree)
    choices: list[int] | None = None
    if all_rows:
        paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(len(tree))]
        choices = sampler.choose(logits, history, paths)
    nodes = [0]
    path: list[int] = []
    while True:
        node = nodes[-1]
        if choices is not None:
            token = choices[node]
        else:
            token = sampler.choose(logits[node : node + 1], history, [path])[0]
        child = below[node].get(token)
        if child is None:
            return Accepted(tuple(nodes), token)
        nodes.append(child)
        path = [*path, token]


def accept_published(
    tree: DraftTree, logits: Float[Tensor, "n V"], history: list[int], sampler: Sampler
) -> Accepted:
    """The published code's rule: **not lossless**, except with ``greedy`` and no penalty.

    Every root-to-leaf path gets its own, independent draw of the target's token at each of its
    nodes; the path that agrees longest with its own draws wins (the first of equals), and its draw
    at the first disagreement, or after its leaf, is the target's own token. As in that code, the
    penalty window of every depth is the root's. Draws are a pure function of (seed, position, leaf).

    Args:
        logits: the target's float32 logits, one row for each node of the tree.
        history: the whole text so far; its last token is the tree's root.
        sampler: processors and seed.

    Raises:
        RunError: the logits hold NaN or an infinite maximum.
    """
    scores = sampler.scores(logits, history, [[]] * len(tree))
    best, greedy = scores.max(-1)
    finite_or_raise(best, scores)
    inner = set(tree.parents)
    paths = [[0, *tree.path(leaf)] for leaf in range(len(tree)) if leaf not in inner]
    if sampler.params.greedy:
        choices = greedy.tolist()
        draws = [[choices[node] for node in path] for path in paths]
    else:
        draws = _independent_draws(scores, paths, len(history), sampler.params.seed)
    longest, winner, token = -1, [0], 0
    for path, drawn in zip(paths, draws, strict=True):
        length = 0
        while length + 1 < len(path) and drawn[length] == tree.tokens[path[length + 1]]:
            length += 1
        if length > longest:
            longest, winner, token = length, path[: length + 1], drawn[length]
    return Accepted(tuple(winner), token)


def _independent_draws(
    scores: Float[Tensor, "n V"], paths: list[list[int]], position: int, seed: int
) -> list[list[int]]:
    """For each path, a token drawn at each of its nodes by inversion of the node's distribution."""
    mass = scores.to(torch.float64).softmax(-1).cumsum(-1)
    leaves = torch.arange(len(paths), device=scores.device)
    drawn: list[list[int]] = [[] for _ in paths]
    for depth in range(max(map(len, paths))):
        members = [i for i, path in enumerate(paths) if depth < len(path)]
        rows = mass[[paths[i][depth] for i in members]]
        uniform = uniforms_(noise_bits(seed ^ _PUBLISHED, position + depth, leaves[members]))
        target = uniform[:, None] * rows[:, -1:]
        # the first token whose cumulated mass exceeds the target has positive mass itself
        tokens = torch.searchsorted(rows, target, right=True).squeeze(1).clamp_(max=rows.shape[1] - 1)
        for i, token in zip(members, tokens.tolist(), strict=True):
            drawn[i].append(token)
    return drawn
