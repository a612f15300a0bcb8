"""The audit of models with recurrent layers: they pass it, and faults of other engines do not."""

from __future__ import annotations

import pytest
import torch

from tests.lossless.test_recurrent import commit_all, commit_in_bfloat16
from tests.speculation.drafters.prices import fix_prices
from tests.tiny import RECURRENT, VOCAB, predictable, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit.report import Report
from tokenswift.audit.run import audit, variants
from tokenswift.kv.states import States

PROMPT = torch.randint(2, VOCAB, (50,), generator=torch.Generator().manual_seed(3)).tolist()
SAMPLINGS = {
    "greedy": SamplingParams(greedy=True, repetition_penalty=1.0),
    "hot": SamplingParams(seed=2, temperature=1.0, repetition_penalty=1.0),
}
#: strategies that need trained heads, or a draft model
NEEDING = {"tokenswift", "medusa", "triforce"}


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive drafting drafts on any machine."""
    fix_prices(monkeypatch, 0.05)


def llm_of(family: str) -> LLM:
    return LLM.from_model(predictable(tiny_model(family)), heads=None)


def audited(llm: LLM) -> Report:
    return audit(llm, variants("all", {}), [PROMPT], SAMPLINGS, tokens=60)


@pytest.mark.parametrize("family", RECURRENT)
def test_families_pass(family: str) -> None:
    report = audited(llm_of(family))
    assert report.failures == []
    assert report.skipped.keys() <= NEEDING
    assert all(error.error == 0 for error in report.errors)


@pytest.mark.parametrize("fault", [commit_all, commit_in_bfloat16])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_planted_faults_fail(family: str, fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(family)
    monkeypatch.setattr(States, "commit", fault)
    assert audited(llm).failures != []
