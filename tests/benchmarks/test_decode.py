"""A variant beside plain decoding: whose tokens, whose times, and figures by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.decode import Side, figures, paired_run, turns
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, SamplingParams
from tokenswift.metrics import distinct
from tokenswift.types import Step


def test_turns_end_at_every_point() -> None:
    assert turns([40]) == [16, 32, 40]
    assert turns([5, 20]) == [5, 16, 20]
    long = turns([20_000, 100_000])
    assert 20_000 in long and long[-1] == 100_000 and len(long) <= 130


def test_a_race_writes_the_tokens_of_generate() -> None:
    """Two forks in turns: both texts are plain decoding's, and nothing of either is lost or counted twice."""
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    params = SamplingParams(seed=4, min_p=0.02)
    prompt = list(range(60, 100))
    shares: list[float] = []
    options = {"tree": (2, 2), "draft": "partial", "budget": 24, "sinks": 3, "ngrams": 2}
    plain, variant = paired_run(llm.prefill(prompt), "tokenswift", options, params, [30, 70], shares.append)
    expected = llm.generate(prompt, 70, "autoregressive", sampling=params, ignore_eos=True)
    got = llm.generate(prompt, 70, "tokenswift", options, params, ignore_eos=True)
    assert plain.tokens == variant.tokens == expected.token_ids
    last = variant.at(70)
    assert (last["tokens"], last["steps"]) == (70, got.metrics.steps)
    assert last["accepted"] / last["gamma"] == pytest.approx(got.metrics.acceptance_rate)
    assert plain.at(70)["steps"] == 70 and plain.at(30)["steps"] == 30
    assert last["seconds"] == pytest.approx(sum(variant.phases.values()), abs=1e-4)
    assert shares[-1] == 1.0 and len(shares) == len(plain.curve) == len(variant.curve)
    figure = figures(plain, variant, 70)
    assert figure["d2"] == pytest.approx(distinct(variant.tokens, 2), abs=1e-6)
    assert figure["alpha"] == pytest.approx(got.metrics.acceptance_rate, abs=1e-6)
    assert figure["beta"] == pytest.approx(got.metrics.ngram_acceptance_rate, abs=1e-6)


def side(steps: list[tuple[int, float, int, int]], ends: list[int]) -> Side:
    """A side whose steps have so many tokens, take so long, accept so many, by n-grams so many; γ is 4."""

    def made() -> Iterator[Step]:
        for tokens, seconds, accepted, ngram in steps:
            yield Step(tuple(range(tokens)), 10, accepted, ngram, 4, times={"verify": seconds})

    found = Side(made())
    for end in ends:
        found.run_to(end)
    return found


def test_figures_by_hand() -> None:
    """Plain 2 s a token; the variant 3 tokens in 3 s, then 1 in 1 s, then 2 in 1 s."""
    plain = side([(1, 2.0, 0, 0)] * 6, [3, 6])
    variant = side([(3, 3.0, 2, 1), (1, 1.0, 0, 0), (2, 1.0, 1, 0)], [3, 6])
    early, late = figures(plain, variant, 3), figures(plain, variant, 6)
    assert (early["speedup"], early["alpha"], early["beta"], early["length"]) == (2.0, 0.5, 0.25, 3.0)
    assert (
        late["speedup"] == 2.4 and late["alpha"] == 0.25 and late["length"] == 2.0 and late["nodes"] == 10.0
    )
    assert late["beta"] == pytest.approx(1 / 12, abs=1e-6)
    assert (late["plain_ms"], late["ms"]) == (2000.0, pytest.approx(5000 / 6, abs=1e-3))
    assert late["plain_minutes"] == 0.2 and late["minutes"] == pytest.approx(5 / 60, abs=1e-6)
    assert late["d1"] == 0.5  # 0 1 2, 0, 0 1
    assert late["distinct"] == pytest.approx((3 / 6 + 4 / 5 + 4 / 4 + 3 / 3) / 4, abs=1e-6)
