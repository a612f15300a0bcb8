"""The parts of adaptive drafting: trees of chances, calibration, long matches, costs."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.spec.adaptive.cost import WRITER, Table, kept_table, measure
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


# ---- calibration ---------------------------------------------


# ---- long matches ---------------------------------------------


# ---- costs ---------------------------------------------

TABLE = Table((1, 2, 4, 8), (10.0, 11.0, 13.0, 21.0), (0.01, 0.01, 0.02, 0.04), 0.5)


def test_measured_tables_are_kept_and_broken_ones_made_again(tmp_path: Path) -> None:
    llm = LLM.from_model(tiny_model("llama"))
    made = kept_table(llm.target, tmp_path, lambda: replace(measure(llm.target), waited=0.0))
    WRITER.submit(int).result()
    assert made.rows[0] == 1 and min(made.fixed) > 0 and min(made.token) >= 0
    assert kept_table(llm.target, tmp_path, lambda: pytest.fail("measured again")) == made
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({"rows": [1]}))
    assert kept_table(llm.target, tmp_path, lambda: TABLE) == TABLE
    WRITER.submit(int).result()
    path.unlink()
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert kept_table(llm.target, blocked / "sub", lambda: TABLE) == TABLE  # nowhere to keep it
