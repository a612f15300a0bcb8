"""``tokenswift audit`` of mixtures of experts: every family passes it."""

from __future__ import annotations

import pytest

from tests.tiny import MIXTURES, RECURRENT, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit.run import audit, variants
from tokenswift.models.decoder import NativeTarget

FAMILIES = [*MIXTURES, *(family for family in RECURRENT if family.endswith("_moe"))]
#: more rows than the windows of tiny models hold, and some that come again
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7] * 3
SAMPLINGS = {
    "sampled": SamplingParams(seed=2, temperature=1.1),
    "greedy": SamplingParams(greedy=True, repetition_penalty=1.0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_passes_the_audit(family: str) -> None:
    llm = LLM.from_model(tiny_model(family), heads="none")
    assert isinstance(llm.target, NativeTarget)
    report = audit(llm, variants("all", {}), [PROMPT], SAMPLINGS, tokens=24)
    assert report.failures == []
    drafted = {row.strategy for row in report.comparisons if row.drafted}
    assert "tokenswift" in drafted
