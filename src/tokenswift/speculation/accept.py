"""Acceptance: which drafted tokens are kept. The exact rule, and the rule of the paper's published
code.

*Exact* (this project): the target chooses one token at each node, with noise keyed by position, and
    a walk
follows these choices from the root. Plain decoding makes the same choices, so for one seed every
drafter and every tree gives the very same tokens.

*Published* (the code of arXiv 2502.18890): a target token is drawn independently for every
    candidate path,
and the longest match is kept. **It is not lossless**: with m paths through a token of probability
    p, that
token is accepted with probability 1 - (1-p)^m. It is here for reproduction, and as the negative
control of the statistical tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.sampling.noise import noise_bits, uniforms_
from tokenswift.sampling.sampler import Sampler, finite_or_raise
from tokenswift.tree import children, published_paths
from tokenswift.types import Accepted, DraftTree, RunError

_PUBLISHED = 0x7075626C69736864  # keeps the published rule's draws apart from the keyed noise


def accept_exact(
    tree: DraftTree,
    logits: Float[Tensor, "n V"],
    history: list[int],
    sampler: Sampler,
    all_rows: bool = False,
    ahead: Sequence[int] = (),
) -> Accepted:
    """Walk from the root along the target's own choices; exact for every tree.

    Args:
        logits: the target's float32 logits, one row for each node.
        history: all tokens so far; the last one is the tree's root.
        sampler: the choice rule.
        all_rows: choose at all nodes in one call (on an accelerator, where a call costs more than
            its rows) instead of at the nodes of the walk alone (on a CPU).
        ahead: tokens between ``history`` and the tree; the last of them is then the root.

    Raises:
        RunError: a row on the walk holds NaN or an infinite maximum. Other rows may hold anything.
    """
    choices: list[int] | None = None
    if all_rows:
        paths = [[*ahead, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
        try:
            choices = sampler.choose(logits, history, paths)
        except RunError:  # some row is invalid, which matters only if it is on the walk
            choices = None

    below, nodes, path = children(tree), [0], list[int]()
    while True:
        node = nodes[-1]
        if choices is None:
            token = sampler.choose(logits[node : node + 1], history, [[*ahead, *path]])[0]
        else:
            token = choices[node]
        child = below[node].get(token)
        if child is None:
            return Accepted(tuple(nodes), token)
        nodes.append(child)
        path.append(token)


def accept_published(
    tree: DraftTree, logits: Float[Tensor, "n V"], history: list[int], sampler: Sampler
) -> Accepted:
    """The published code's rule: **not lossless**, except with ``greedy`` and no penalty.

    Each candidate path (`tree.published_paths`) gets independent draws of the target's token at its
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
    tied, depth = list(range(len(paths))), 0  # the paths that agree longest so far
    while True:
        nodes = [paths[i][depth] for i in tied]
        drawn = _draws(logits, nodes, tied, history, len(history) + depth, sampler)
        longer = [
            i
            for i, token in zip(tied, drawn, strict=True)
            if depth + 1 < len(paths[i]) and tree.tokens[paths[i][depth + 1]] == token
        ]
        if not longer:
            break
        tied, depth = longer, depth + 1
    bits = noise_bits(
        sampler.params.seed ^ _PUBLISHED, len(history), torch.tensor([-1])
    )  # -1 is no path
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
        position: of the tokens to draw.
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
    found = torch.zeros_like(numbers)
    for row, node in enumerate(rows):
        here = torch.tensor([i for i, at in enumerate(nodes) if at == node], device=scores.device)
        # the first token whose cumulative mass exceeds the draw has positive mass itself
        found[here] = torch.searchsorted(mass[row], uniform[here] * mass[row, -1], right=True)
    return found.clamp_(max=scores.shape[-1] - 1).tolist()
