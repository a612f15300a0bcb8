"""Acceptance: which drafted tokens are kept.

The target chooses one token at each node, with noise keyed by position, and a walk follows these
choices from the root. Plain decoding makes the same choices, so for one seed every drafter and
every tree gives the very same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tokenswift.config.strategies import Acceptance
from tokenswift.sampling.sampler import Sampler
from tokenswift.tree import children
from tokenswift.types import Accepted, DraftTree, RunError


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """A rule by which drafted tokens are kept.

    Attributes:
        name: as options and journals call it.
        accept: from a verified tree, its logits (n, V), all tokens so far and the target's choice
            rule to what is accepted.
        is_exact: no token depends on what was drafted.
    """

    name: Acceptance
    accept: Callable[[DraftTree, Tensor, list[int], Sampler], Accepted]
    is_exact: bool


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
        paths = []
        for node in range(len(tree)):
            path = [tree.tokens[above] for above in tree.path(node)]
            paths.append([*ahead, *path])
        try:
            choices = sampler.choose(logits, history, paths)
        except RunError:  # some row is invalid, which matters only if it is on the walk
            choices = None

    below = children(tree)
    nodes = [0]
    path = list[int]()
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


def _accept_in_step(
    tree: DraftTree, logits: Float[Tensor, "n V"], history: list[int], sampler: Sampler
) -> Accepted:
    """:func:`accept_exact`, of all rows or of the walk's alone: what is faster on the device."""
    return accept_exact(tree, logits, history, sampler, all_rows=not sampler.row_by_row)


EXACT = AcceptanceRule("exact", _accept_in_step, is_exact=True)
