"""What a summary says of drafting, in words, and what `plan` and `runs` call things."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, Generation
from tokenswift.cli.plan import Forecast, part_in_words, room_in
from tokenswift.cli.results import DRAFTED_BY, TOKENS_FOR_RATIO, drafting_summary, enumeration
from tokenswift.runs.lists import FEW_COLUMNS, RunSummary, cells
from tokenswift.types import SOURCES


@pytest.fixture(scope="module")
def generation() -> Generation:
    """One whose figures the tests set."""
    with LLM.from_model(tiny_model(), tiny_tokenizer()) as llm:
        return llm.generate([1, 2, 3], 4, ignore_eos=True)


def drafted(generation: Generation, count: int, **sources: int) -> Generation:
    """A generation of so many tokens, at 1.62 times the speed of plain decoding."""
    drafting: dict[str, object] = {**(generation.drafting or {}), "gain": 1.62}
    metrics = replace(generation.metrics, mean_acceptance_length=2.14)
    return replace(
        generation,
        token_ids=[1] * count,
        token_sources=sources,
        drafting=drafting,
        metrics=metrics,
    )


def test_a_long_text_has_its_speed_beside_plain_decoding(generation: Generation) -> None:
    result = drafted(generation, TOKENS_FOR_RATIO, target=150, ngram=50, eagle=100)
    assert drafting_summary(result) == (
        "; 2.1 tokens a step; 1.6 times as fast as without drafts; "
        "drafts from the trained drafter and earlier text"
    )


def test_a_short_text_has_no_ratio(generation: Generation) -> None:
    result = drafted(generation, TOKENS_FOR_RATIO - 1, target=150, recycle=5)
    assert drafting_summary(result) == "; 2.1 tokens a step; drafts from earlier choices"


def test_nothing_is_said_where_no_draft_was_accepted(generation: Generation) -> None:
    assert drafting_summary(drafted(generation, 500, target=500, eagle=0)) == ""


def test_every_source_of_drafts_has_words() -> None:
    assert set(DRAFTED_BY) == set(SOURCES) - {"target"}


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_names_are_enumerated(names: list[str], text: str) -> None:
    assert enumeration(names) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tree auto", "drafts of a step"),
        ("recycle auto", "table of earlier choices"),
        ("max_new_tokens 2000", "keys and values of 2,000 new tokens"),
        ("prompt 3 tokens", "keys and values of the prompt, 3 tokens"),
        ("eagle /a b/c.gguf", "trained drafter"),
        ("weights", "weights"),
    ],
)
def test_a_plan_names_memory_in_words(name: str, words: str) -> None:
    assert part_in_words(name) == words


@pytest.mark.parametrize(
    ("most", "positions", "words"),
    [
        (100, 100, "enough for all 100 new tokens that the model has positions for"),
        (99, 100, "up to 99 new tokens fit"),
        (99, None, "up to 99 new tokens fit"),
    ],
)
def test_a_plan_says_whether_memory_or_positions_end_a_text(
    most: int, positions: int | None, words: str
) -> None:
    assert room_in(cast(Forecast, {"most": most, "positions": positions})) == words


def test_a_list_of_runs_fits_80_columns() -> None:
    row = {
        "run": "novels/third",
        "state": "finished (length)",
        "tokens": 100_000,
        "max_new_tokens": 100_000,
        "tokens_per_second": 1234.5,
        "written": "2026-11-28 20:00:00",
    }
    shown = cells(cast(RunSummary, row), few=True)
    assert set(shown) == set(FEW_COLUMNS)
    assert sum(map(len, shown.values())) + 2 * len(shown) <= 80
