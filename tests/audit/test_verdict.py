"""The audit's verdict: every finding can fail it, and nothing that was not run counts as passed."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit.compare import (
    AuditOptions,
    Comparison,
    Difference,
    DistributionTest,
    Report,
    Variant,
    audit,
    variants,
)
from tokenswift.audit.logits import Distance, LogitError
from tokenswift.types import InputError

NUMBERS = LogitError(32, 1e-4, Distance(1e-4, 1e-5), Distance(1e-4, 1e-5), Distance(4e-4, 1e-4))
TIE = Difference(place=5, before="so", plain=(7, "a"), other=(9, "b"), scores=(1.5, 1.4999), near_tie=True)
WRONG = replace(TIE, near_tie=False)
EQUAL = Comparison("medusa", 1, "greedy", 0, 32, 1.5, 0.1, None)
DISTRIBUTION = DistributionTest("medusa", "sampling", 0.4, 100, 0.1, 100)


def report() -> Report:
    """A report in which everything is well."""
    return Report(
        "tiny",
        "float32",
        "cpu",
        errors=[NUMBERS],
        comparisons=[EQUAL, replace(EQUAL, strategy="triforce")],
        distributions=[replace(DISTRIBUTION, strategy="autoregressive"), DISTRIBUTION],
    )


def failed(found: Report, *words: str) -> None:
    """One failure, with these words, everywhere that a verdict is given."""
    assert len(found.failures) == 1 and all(word in found.failures[0] for word in words), found.failures
    assert found.headline == "NOT EXACT" and "Verdict: NOT EXACT" in found.text()
    assert found.record()["exact"] is False and found.record()["verdict"] == "NOT EXACT"


def test_a_report_without_findings_is_exact() -> None:
    found = report()
    assert found.failures == [] and found.headline == "exact" and found.record()["exact"] is True
    assert found.record()["strategies"] == ["medusa", "triforce"] == found.strategies
    assert "Verdict: exact. 2 texts by 2 strategies, 64 tokens." in found.text()


# ---- what fails it ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["autoregressive", "medusa"])
def test_a_law_that_is_not_followed_fails(strategy: str) -> None:
    found = report()
    found.distributions.append(DistributionTest(strategy, "top-k", 1e-6, 100, 0.4, 100))
    failed(found, strategy, "distribution", "top-k", "1.0e-06")


def test_runs_that_differ_from_plain_decoding_fail_though_the_law_fits() -> None:
    found = report()
    found.distributions.append(replace(DISTRIBUTION, case="top-k", same=99))
    failed(found, "medusa", "1 of 100", "top-k")


def test_a_difference_that_rounding_does_not_explain_fails() -> None:
    found = report()
    found.comparisons.append(replace(EQUAL, seed=3, tokens=5, divergence=WRONG))
    failed(found, "medusa", "new token 5", "seed 3")
    assert found.near_ties == [] and found.strategies == ["triforce"]
    assert "FAILURE: medusa, prompt 1, greedy, seed 3, new token 5" in found.text()
    assert "'a' (7), score 1.5\n  medusa: 'b' (9), score 1.4999" in found.text()


def test_a_score_that_a_filter_took_is_null_in_the_record() -> None:
    found = report()
    found.comparisons.append(replace(EQUAL, divergence=replace(WRONG, scores=(1.0, -math.inf))))
    row = json.loads(json.dumps(found.record(), allow_nan=False))["comparisons"][-1]["divergence"]
    assert row["scores"] == [1.0, None] and row["near_tie"] is False and row["plain"] == [7, "a"]


@pytest.mark.parametrize("kind", ["one_row", "tree"])
def test_passes_that_compute_something_else_fail(kind: str) -> None:
    found = report()
    off = replace(NUMBERS, error=0.0, one_row=Distance(0.0, 0.0), tree=Distance(0.0, 0.0))
    found.errors.append(replace(off, **{kind: Distance(7.5, 2.0)}))
    failed(found, "prompt 2", "7.5e+00")


def test_an_infinite_error_fails_and_is_null_in_the_record() -> None:
    found = report()
    found.errors.append(replace(NUMBERS, error=math.inf, tree=Distance(math.inf, math.inf)))
    failed(found, "prompt 2")
    row = json.loads(json.dumps(found.record(), allow_nan=False))["errors"][1]
    assert row["error"] is row["tree"] is row["typical"]["tree"] is None and row["sound"] is False
    assert row["one_row"] == 1e-4 and row["allowed"] == 4e-4


def test_nothing_compared_fails() -> None:
    failed(Report("tiny", "float32", "cpu"), "nothing was compared")


# ---- what qualifies it --------------------------------------------------------------------------


def test_near_ties_are_in_the_headline() -> None:
    found = report()
    found.comparisons.append(replace(EQUAL, seed=1, tokens=5, divergence=TIE))
    assert found.failures == [] and found.headline == "exact up to 1 near-tie"
    found.comparisons.append(replace(EQUAL, seed=2, tokens=5, divergence=TIE))
    assert "Verdict: exact up to 2 near-ties. 4 texts" in found.text()
    assert found.record()["verdict"] == "exact up to 2 near-ties" and found.record()["near_ties"] == 2


def test_a_skipped_strategy_did_not_pass() -> None:
    found = report()
    found.skipped["medusa"] = "no heads"
    assert found.failures == [] and found.headline == "exact; not run: medusa"
    assert found.strategies == ["triforce"] == found.record()["strategies"]
    assert "1 text by 1 strategy, 32 tokens" in found.text() and "Not run: medusa (no heads)" in found.text()
    found.skipped["triforce"] = "no draft model"
    failed(found, "nothing was compared")


def test_a_failure_of_a_strategy_that_was_skipped_later_stays_one() -> None:
    found = report()
    found.skipped["medusa"] = "no room"
    found.comparisons.append(replace(EQUAL, divergence=WRONG))
    failed(found, "medusa")


def test_an_audit_names_what_it_could_not_run() -> None:
    """A strategy that runs on one prompt and not on the next has not passed."""
    llm = LLM.from_model(tiny_model("llama"))
    real = llm.generate

    def generate(prompt: list[int], count: int, strategy: str, *args: object, **kwargs: object):
        if strategy == "magicdec" and len(prompt) > 8:
            raise InputError("prompt is too long")
        return real(prompt, count, strategy, *args, **kwargs)  # type: ignore[arg-type]

    llm.generate = generate  # type: ignore[method-assign]
    prompts: list = [[5, 6, 7], [i % VOCAB for i in range(20)]]
    known = [v for v in variants("all", {}) if v.label != "auto"]  # it may find that nothing pays
    plan = AuditOptions(known, prompts, {"greedy": SamplingParams(greedy=True)}, 8, tolerate=True)
    found = audit(llm, plan)
    assert set(found.skipped) == {"medusa", "triforce", "magicdec"}
    assert any(c.strategy == "magicdec" for c in found.comparisons)
    assert found.headline == "exact; not run: medusa, triforce, magicdec"
    assert found.strategies == ["tokenswift"] and len(found.passed) == 2


def test_a_strategy_that_drafted_nothing_was_not_run() -> None:
    """Its passes are those of plain decoding: equal tokens would be no proof of anything."""
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    idle = Variant("idle", "auto", {"draft": "hidden", "ngrams": 0})  # no heads, no text: nothing to do
    busy = Variant("busy", "magicdec", {"budget": 64})
    plain = Variant("plain", "autoregressive")
    settings = {"prompts": [[5, 6, 7]], "samplings": {"greedy": SamplingParams(greedy=True)}, "tokens": 8}
    found = audit(llm, AuditOptions([idle, busy, plain], **settings))
    assert found.skipped == {"idle": "it drafted nothing on these texts; it may draft from: none"}
    assert found.strategies == ["busy", "plain"] and found.headline == "exact; not run: idle"
    drafted = {c.strategy: c.drafted for c in found.comparisons}
    assert drafted["idle"] == drafted["plain"] == 0 < drafted["busy"]
    alone = audit(llm, AuditOptions([idle], **settings))
    assert alone.failures == ["nothing was compared"] and alone.headline == "NOT EXACT"
