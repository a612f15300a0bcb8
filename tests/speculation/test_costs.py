"""What passes cost before any was timed."""

from __future__ import annotations

import pytest

from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.speculation.costs import FIRST_COST, Costs, first_costs


def reads_more_with_rows(rows: float) -> float:
    """Bytes that a mixture reads of 8 of 128 experts a row, beside as many of other weights."""
    return 1000.0 + 16000.0 * (1 - (1 - 8 / 128) ** rows)


def test_rows_of_a_dense_model_begin_with_the_price_of_a_row() -> None:
    assert Costs().verify(5) == pytest.approx(1 + 4 * FIRST_COST)


def test_rows_of_a_mixture_begin_with_the_price_of_their_experts() -> None:
    costs = Costs(first_cost=first_costs(reads_more_with_rows))
    assert costs.verify(1) == pytest.approx(1.0)
    assert costs.verify(4) == pytest.approx(1 + 3 * FIRST_COST + 1.3202, abs=1e-3)


def test_a_price_that_was_learnt_takes_the_place_of_the_first() -> None:
    costs = Costs(first_cost=first_costs(reads_more_with_rows))
    for _ in range(30):
        costs.observe(1, 10.0)
        costs.observe(1, 10.0)
        costs.observe(4, 13.0)
    assert costs.verify(4) == pytest.approx(1.3, abs=0.1)


def test_a_models_first_prices_are_those_of_its_experts() -> None:
    dense = LLM.from_model(tiny_model("llama"), heads="none").resources.learnt()
    mixture = LLM.from_model(tiny_model("qwen3_moe"), heads="none").resources.learnt()
    assert dense.first_cost(4) == pytest.approx(1 + 3 * FIRST_COST)
    assert mixture.first_cost(4) > 1.5
