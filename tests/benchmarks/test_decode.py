"""A variant beside plain decoding: whose tokens, whose times, and figures by hand."""

from __future__ import annotations

import pytest

from benchmarks.decode import figures, paired_run
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, SamplingParams
from tokenswift.types import distinct


def test_a_race_writes_the_tokens_of_generate() -> None:
    """Two forks in turns: both texts are plain decoding's, and nothing of either is lost or counted
    twice."""
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    params = SamplingParams(seed=4, min_p=0.02)
    prompt = list(range(60, 100))
    options = {"tree": (2, 2), "draft": "partial", "budget": 24, "sinks": 3, "ngrams": 2}
    plain, variant = paired_run(llm.prefill(prompt), "tokenswift", options, params, [30, 70])
    expected = llm.generate(prompt, 70, "autoregressive", sampling=params, ignore_eos=True)
    got = llm.generate(prompt, 70, "tokenswift", options, params, ignore_eos=True)
    assert plain.tokens == variant.tokens == expected.token_ids
    last = variant.at(70)
    assert (last["tokens"], last["steps"]) == (70, got.metrics.steps)
    assert last["accepted"] / last["gamma"] == pytest.approx(got.metrics.acceptance_rate)
    assert plain.at(70)["steps"] == 70 and plain.at(30)["steps"] == 30
    assert last["seconds"] == pytest.approx(sum(variant.phases.values()), abs=1e-4)
    assert len(plain.curve) == len(variant.curve)
    figure = figures(plain, variant, 70)
    assert figure["d2"] == pytest.approx(distinct(variant.tokens, 2), abs=1e-6)
    assert figure["alpha"] == pytest.approx(got.metrics.acceptance_rate, abs=1e-6)
    assert figure["beta"] == pytest.approx(got.metrics.ngram_acceptance_rate, abs=1e-6)
