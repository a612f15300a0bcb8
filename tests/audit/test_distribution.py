"""The audit's test of a distribution: its chi-square, and the tokens that plain decoding draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit import Audit, chi_square, sampled, variants
from tokenswift.types import InputError

PROMPT = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(6)).tolist()


def test_chi_square_is_scipys_and_refuses_a_wrong_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    true, wrong = {0: 0.5, 1: 0.3, 2: 0.2}, {0: 0.45, 1: 0.35, 2: 0.2}
    drawn = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 8000, True, generator=generator).tolist()
    expected = chisquare([drawn.count(i) for i in range(3)], [8000 * p for p in true.values()]).pvalue
    assert chi_square(drawn, true) == pytest.approx(float(expected), rel=1e-8) and expected > 1e-3
    assert chi_square(drawn, wrong) < 1e-6


def test_an_excluded_outcome_gives_zero_and_too_few_are_refused() -> None:
    assert chi_square([0, 0, 1, 2], {0: 0.5, 1: 0.5}) == 0.0
    with pytest.raises(ValueError, match="too few"):
        chi_square([0, 1], {0: 0.5, 1: 0.5})


# ---- on a model ---------------------------------------------------------------------------------

PARAMS = SamplingParams(min_p=0.0, repetition_penalty=1.3, temperature=0.6)


def test_draws_follow_the_models_own_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    assert sampled(llm, PROMPT, PARAMS, 400) > 1e-4
    real = llm.generate
    other = replace(PARAMS, temperature=0.4)
    monkeypatch.setattr(llm, "generate", lambda *args, sampling, **how: real(
        *args, sampling=replace(other, seed=sampling.seed), **how))  # fmt: skip
    assert sampled(llm, PROMPT, PARAMS, 400) < 1e-6  # negative control


def test_an_audit_tests_the_distribution_where_asked() -> None:
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    samplings = {"sampling": PARAMS, "greedy": replace(PARAMS, greedy=True)}
    asked = Audit(llm, variants("magicdec", {}), [PROMPT], samplings, tokens=4)
    assert asked.run().distributions == {}
    found = replace(asked, runs=100).run()
    assert list(found.distributions) == ["sampling"] and found.distributions["sampling"] > 1e-5
    assert found.headline == "exact" and "distribution of sampling: p " in found.text()
    with pytest.raises(InputError, match="distribution is 100; valid: 0 with greedy"):
        replace(asked, runs=100, samplings={"greedy": samplings["greedy"]}).run()
    found = replace(asked, runs=100, samplings={"sampling": replace(PARAMS, top_k=1)}).run()
    assert found.headline == "exact; not run: distribution, sampling"  # no choice is left
