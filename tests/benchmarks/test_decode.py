"""A variant beside plain decoding: whose tokens, whose times, and figures by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.decode import Side, counted, figures, paired_run
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, SamplingParams
from tokenswift.types import Generation, distinct

PROMPT = list(range(60, 100))
PARAMS = SamplingParams(seed=4, min_p=0.02)
OPTIONS = {"tree": (2, 2), "draft": "partial", "budget": 24, "sinks": 3, "ngrams": 2}
NEW = 70


@dataclass(frozen=True, slots=True)
class Race:
    """Both sides of a paired run, and what `generate` writes by either strategy."""

    plain: Side
    variant: Side
    plain_alone: Generation
    variant_alone: Generation


@pytest.fixture(scope="module")
def race() -> Race:
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    plain, variant = paired_run(llm.prefill(PROMPT), "tokenswift", OPTIONS, PARAMS, [30, NEW])
    return Race(
        plain=plain,
        variant=variant,
        plain_alone=llm.generate(PROMPT, NEW, "autoregressive", sampling=PARAMS, ignore_eos=True),
        variant_alone=llm.generate(PROMPT, NEW, "tokenswift", OPTIONS, PARAMS, ignore_eos=True),
    )


def test_both_texts_are_plain_decodings(race: Race) -> None:
    assert race.plain.tokens == race.plain_alone.token_ids
    assert race.variant.tokens == race.plain_alone.token_ids


def test_no_step_is_lost_or_counted_twice(race: Race) -> None:
    last = race.variant.at(NEW)
    assert last.tokens == NEW
    assert last.steps == race.variant_alone.metrics.steps
    assert race.plain.at(30).steps == 30
    assert race.plain.at(NEW).steps == NEW
    assert last.seconds == pytest.approx(sum(race.variant.phase_seconds.values()), abs=1e-4)
    assert len(race.plain.curve) == len(race.variant.curve)


def test_figures_are_those_of_generate(race: Race) -> None:
    alone = race.variant_alone.metrics
    figure = figures(race.plain, race.variant, NEW)
    assert figure["d2"] == pytest.approx(distinct(race.variant.tokens, 2), abs=1e-6)
    assert figure["alpha"] == pytest.approx(alone.acceptance_rate, abs=1e-6)
    assert figure["beta"] == pytest.approx(alone.ngram_acceptance_rate, abs=1e-6)
    last = race.variant.at(NEW)
    assert last.accepted / last.gamma == pytest.approx(alone.acceptance_rate)


def test_rows_without_times_keep_what_is_counted(race: Race) -> None:
    named = {**figures(race.plain, race.variant, NEW), "share_draft": 0.1}
    names = counted(named).keys()
    assert {"alpha", "length", "nodes", "d4"} <= names
    assert not {"speedup", "ms", "minutes", "share_draft"} & names
