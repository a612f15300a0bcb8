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
from tokenswift.sampling.ranking import Ranked
from tokenswift.spec.adaptive.acceptance import Calibration, features
from tokenswift.spec.adaptive.cost import WRITER, Costs, Table, kept_table, measure
from tokenswift.spec.drafters.lookup import MOST, Matches
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


def test_no_more_nodes_than_there_are_prices() -> None:
    tree = _random_tree(random.Random(1), 20)
    chosen, _ = tree.select([1.0, 1.0, 1.0, 1.0], 0.001)
    assert len(chosen) == 3


def test_two_sources_of_one_token_make_it_likelier() -> None:
    tree = CandidateTree(7)
    first = tree.add(0, 5, "ngram", 0.5)
    assert tree.add(0, 5, "head", 0.5) == first and tree.given[first] == pytest.approx(0.75)
    assert tree.sources[first] == "head" and tree.add(first, 5, "ngram") != first
    assert tree.chance(2) < 0.75


# ---- calibration ---------------------------------------------


def test_chances_learn_what_happens() -> None:
    """Outcomes by a distribution unknown to the priors: after 10,000 places the bins agree within 0.05."""
    rnd = random.Random(0)
    calibration = Calibration()
    for place in range(20000):
        if place == 10000:
            calibration.reliability = type(calibration.reliability)()
        values = sorted((rnd.gauss(0, 2) for _ in range(4)), reverse=True)
        ranked = Ranked([1, 2, 3, 4], values, [rnd.random() for _ in range(4)])
        sure = 1 / (1 + math.exp(-(features(ranked, 0, 0)[1] - 1.0)))
        right = 1 if rnd.random() < sure else rnd.choice([2, 2, 3, 9])
        chances, made = calibration.chances("hidden", ranked, 0)
        assert sum(chances) <= 1
        calibration.learn("hidden", made, chances, ranked.tokens, right)
    bins = [row for row in calibration.reliability.rows() if row["count"] > 300]
    assert len(bins) >= 5
    for row in bins:
        assert row["predicted"] == pytest.approx(row["observed"], abs=0.05)
    again = Calibration(calibration.weights())
    assert again.chances("hidden", ranked, 0)[0] == pytest.approx(
        calibration.chances("hidden", ranked, 0)[0], abs=1e-3
    )


def test_a_greater_lead_is_a_greater_chance() -> None:
    calibration = Calibration()
    found = []
    for lead in (0.05, 0.5, 1.5, 4.0):
        chances, _ = calibration.chances("hidden", Ranked([3, 4], [lead, 0.0], [0.4, 0.3]), 0)
        found.append(chances[0])
    assert found == sorted(found) and found[0] < 0.25 < 0.4 < found[-1]


# ---- long matches ---------------------------------------------


def test_the_longest_match_decides() -> None:
    matches = Matches(penalised=False)
    matches.extend([1, 2, 3, 4, 5, 9, 9, 3, 4, 5, 8, 8, 2, 3, 4, 5])
    assert [token for token, _ in matches.predict()][:3] == [
        9,
        9,
        3,
    ]  # (2, 3, 4, 5) and not the later (3, 4, 5)


def test_a_loop_goes_on_beyond_the_text() -> None:
    matches = Matches(penalised=False)
    matches.extend([7, 1, 2, 3, 1, 2, 3])
    assert [token for token, _ in matches.predict()] == [([1, 2, 3] * MOST)[i] for i in range(MOST)]


def test_no_match_no_prediction() -> None:
    matches = Matches(penalised=True)
    assert matches.predict() == []
    matches.extend([1, 2, 3, 4])
    assert matches.predict() == []
    matches.learn([5])  # there is nothing to compare


def test_a_match_goes_on_behind_a_token_that_differs() -> None:
    matches = Matches(penalised=False)
    matches.extend([1, 2, 3, 4, 5, 6, 7, 8, 50, 51, 1, 2, 3, 40])
    assert [token for token, _ in matches.predict()][:4] == [5, 6, 7, 8]
    matches.extend([41, 42])
    assert matches.predict() == [], "three in a row: given up"


def test_tokens_that_were_new_are_doubted_and_votes_count() -> None:
    """Lines that differ in one place: (1, 2, 3, N, 4, 5)."""
    matches = Matches(penalised=False)
    for number in range(20, 26):
        matches.extend([1, 2, 3, number, 4, 5])
    matches.extend([1, 2, 3])
    made = matches.predict()
    assert [token for token, _ in made][:4] == [25, 4, 5, 1]
    chances = [chance for _, chance in made]
    assert chances[0] < 0.4 * chances[1] and chances[0] < 0.4 * chances[2]
    other = Matches(penalised=False)
    for _ in range(6):
        other.extend([1, 2, 3, 25, 4, 5])
    other.extend([1, 2, 3])
    assert other.predict()[0][1] > 2.5 * chances[0]


def test_chances_of_matches_follow_their_luck() -> None:
    for right in (True, False):
        matches = Matches(penalised=False)
        matches.extend([1, 2, 3, 4] * 3)
        for _ in range(80):
            (token, _), *_ = matches.predict()
            matches.learn([token if right else token + 50])
        chance = matches.predict()[0][1]
        assert chance > 0.9 if right else chance < 0.1


# ---- costs ---------------------------------------------

TABLE = Table((1, 2, 4, 8), (10.0, 11.0, 13.0, 21.0), (0.01, 0.01, 0.02, 0.04), 0.5)


def test_prices_between_measured_rows() -> None:
    assert TABLE.verify(1, 100) == pytest.approx(11)
    assert TABLE.verify(3, 100) == pytest.approx((11 + 1 + 13 + 2) / 2)
    assert TABLE.verify(16, 0) == pytest.approx(42)


def test_outliers_move_nothing_and_drift_moves_all() -> None:
    costs = Costs(TABLE)
    for i in range(80):
        costs.observe(1, 100, 11 * (50 if i % 10 == 0 else 1))
    assert costs.verify(1, 100) == pytest.approx(11, rel=0.01)
    for _ in range(80):
        costs.observe(2, 100, 2 * 12)  # another process came: everything takes twice as long
    assert costs.verify(2, 100) == pytest.approx(24, rel=0.01)
    assert costs.verify(8, 0) == pytest.approx(42, rel=0.01)


def test_a_slow_while_makes_no_row_count_dear() -> None:
    """Plain steps are one in many while something drafts. The machine takes half as long again for a while in
    which nearly all steps are plain: once it is over, plain ones are priced as before, and a count that truly
    takes longer than the table says keeps its own price."""
    costs = Costs(TABLE)

    def step(rows: int, slow: float = 1.0) -> None:
        costs.observe(rows, 100, slow * TABLE.verify(rows, 100) * (1.2 if rows == 2 else 1.0))

    def drafting(steps: int) -> None:
        for i in range(steps):
            step(1 if i % 48 == 47 else 2)

    drafting(400)
    for i in range(100):
        step(2 if i % 20 == 19 else 1, slow=1.5)
    drafting(100)
    assert costs.verify(2, 100) == pytest.approx(1.2 * TABLE.verify(2, 100), rel=0.02)
    assert costs.verify(1, 100) == pytest.approx(TABLE.verify(1, 100), rel=0.02)


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
