"""The audit's test of a distribution: its chi-square, and the pairs of tokens that a model writes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit import logits as distribution
from tokenswift.audit.compare import Audit, variants
from tokenswift.types import InputError

PROMPT = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(6)).tolist()


def test_chi_square_is_scipys_and_refuses_a_wrong_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    true, wrong = {0: 0.5, 1: 0.3, 2: 0.2}, {0: 0.45, 1: 0.35, 2: 0.2}
    drawn = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 8000, True, generator=generator).tolist()
    expected = chisquare([drawn.count(i) for i in range(3)], [8000 * p for p in true.values()]).pvalue
    assert (
        distribution.chi_square(drawn, true) == pytest.approx(float(expected), rel=1e-8) and expected > 1e-3
    )
    assert distribution.chi_square(drawn, wrong) < 1e-6


def test_chi_square_p_values_are_uniform_under_the_law() -> None:
    """Its own calibration: over 300 samples from the distribution, the p-values are uniform."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    exact = dict(enumerate(weights.double().div(weights.double().sum()).tolist()))
    values = sorted(
        distribution.chi_square(torch.multinomial(weights, 400, True, generator=generator).tolist(), exact)
        for _ in range(300)
    )
    furthest = max(abs(value - (i + 0.5) / 300) for i, value in enumerate(values))
    assert furthest < 1.63 / math.sqrt(300)  # Kolmogorov-Smirnov at 1%


def test_an_excluded_outcome_gives_zero_and_too_few_are_refused() -> None:
    assert distribution.chi_square([0, 0, 1, 2], {0: 0.5, 1: 0.5}) == 0.0
    with pytest.raises(ValueError, match="too few"):
        distribution.chi_square([0, 1], {0: 0.5, 1: 0.5})


# ---- on a model ---------------------------------------------------------------------------------

PARAMS = SamplingParams(min_p=0.0, repetition_penalty=1.3, temperature=0.6)


def test_pairs_follow_the_models_own_probabilities() -> None:
    """All outcomes that few runs can show are one; a strategy's runs are plain decoding's."""
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    law = distribution.likely_pairs(llm, PROMPT, PARAMS, 400)
    assert (
        len(law) > 3
        and sum(law.values()) == pytest.approx(1)
        and distribution.testable(llm, PROMPT, PARAMS, 400)
    )
    assert min(p for pair, p in law.items() if len(pair) == 2) * 400 >= distribution.LEAST
    plain = distribution.pairs_written(llm, PROMPT, "autoregressive", {}, PARAMS, 400)
    drafted = distribution.pairs_written(llm, PROMPT, "magicdec", {"gamma": 2}, PARAMS, 50)
    assert drafted == plain[:50]
    seen = [distribution.outcome(pair, law) for pair in plain]
    assert distribution.chi_square(seen, law) > 1e-4
    other = distribution.likely_pairs(llm, PROMPT, replace(PARAMS, temperature=0.4), 400)
    seen = [distribution.outcome(pair, other) for pair in plain]
    assert distribution.chi_square(seen, other) < 1e-6  # negative control


def test_an_audit_tests_the_distribution_where_asked() -> None:
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    samplings = {"sampling": PARAMS, "greedy": replace(PARAMS, greedy=True)}
    asked = Audit(llm, variants("magicdec", {}), [PROMPT], samplings, tokens=4)
    assert asked.run().distributions == []
    found = replace(asked, runs=100).run()
    assert [(t.strategy, t.case, t.runs, t.same) for t in found.distributions] == [
        ("autoregressive", "sampling", 100, 100),
        ("magicdec", "sampling", 100, 100),
    ]
    assert found.headline == "exact" and "distribution of two tokens, magicdec" in found.text()
    with pytest.raises(InputError, match="distribution is 100; valid: 0 with greedy"):
        replace(asked, runs=100, samplings={"greedy": samplings["greedy"]}).run()
    found = replace(asked, runs=100, samplings={"sampling": replace(PARAMS, top_k=1)}).run()
    assert found.headline == "exact; not run: distribution, sampling"  # no choice is left
