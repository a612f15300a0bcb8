"""The part of the candidates that adaptive drafting takes is the best one."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from tokenswift.tree import CandidateTree

# ---- candidate trees ---------------------------------------------


def _random_tree(rnd: random.Random, nodes: int) -> CandidateTree:
    tree = CandidateTree(0)
    while len(tree) <= nodes:
        tree.add(rnd.randrange(len(tree)), rnd.randrange(30), "head", rnd.random())
    return tree


@pytest.mark.parametrize("seed", range(20))
def test_the_selection_is_the_best_of_all_trees(seed: int) -> None:
    """Against every subset that is closed under parents, for prices that rise ever faster."""
    rnd = random.Random(seed)
    tree = _random_tree(rnd, 9)
    costs = [1 + 0.05 * n + 0.01 * n * n for n in range(len(tree))]
    rate = rnd.choice([0.5, 1.0, 3.0])
    chosen, expected = tree.select(costs, rate)
    assert expected == pytest.approx(sum(tree.chance(node) for node in chosen))
    best = -math.inf
    for size in range(len(tree)):
        for nodes in combinations(range(1, len(tree)), size):
            if all(tree.parents[node] in (0, *nodes) for node in nodes):
                best = max(best, sum(map(tree.chance, nodes)) - rate * costs[size])
    assert expected - rate * costs[len(chosen)] == pytest.approx(best)
    made = tree.build(chosen)
    assert len(made) == len(chosen) + 1 and made.gamma == max(made.depths)
    for place, node in enumerate(chosen, 1):
        assert [made.tokens[i] for i in made.path(place)] == tree.path(node)
