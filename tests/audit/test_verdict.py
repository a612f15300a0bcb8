"""The audit's verdict: every finding can fail it, and nothing that was not run counts as passed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit.logits import LogitError
from tokenswift.audit.report import Comparison, Report
from tokenswift.audit.run import audit, difference, variants
from tokenswift.types import InputError

NUMBERS = LogitError(32, 1e-4, (1e-4, 1e-5), (1e-4, 1e-5), (4e-4, 1e-4))
EQUAL = Comparison("medusa", 1, "greedy", 0, 32, None, 5)
GREEDY = {"greedy": SamplingParams(greedy=True)}


def exact_report() -> Report:
    """A report in which everything is well."""
    texts = [EQUAL, replace(EQUAL, strategy="triforce")]
    return Report("tiny", "float32", "cpu", [NUMBERS], texts)


def test_a_report_without_findings_is_exact() -> None:
    report = exact_report()
    assert report.failures == []
    assert report.headline == "exact"
    assert report.record()["exact"] is True
    assert "medusa, greedy: 1 text, 32 tokens equal, 5 drafted" in report.text()
    assert report.text().endswith("\nVerdict: exact.")


INFINITE = (math.inf, math.inf)
DIFFERS = replace(EQUAL, seed=3, difference="new token 5: 'a'")
FAR = replace(NUMBERS, one_row=(7.5, 2.0))
WRONG: dict[str, tuple[Callable[[Report], object], str]] = {
    "tokens": (lambda r: r.comparisons.append(DIFFERS), "(prompt 1, greedy, seed 3, new token 5"),
    "skipped later": (
        lambda r: (r.skipped.update(medusa=""), r.comparisons.append(DIFFERS)),
        "medusa differs",
    ),
    "one-row passes": (lambda r: r.errors.append(FAR), "prompt 2: one-row passes are off"),
    "tree passes": (lambda r: r.errors.append(replace(NUMBERS, tree=INFINITE)), "passes by inf"),
    "nothing": (lambda r: r.skipped.update(medusa="", triforce=""), "nothing was compared"),
}


@pytest.mark.parametrize("what", WRONG)
def test_each_finding_fails_it(what: str) -> None:
    spoil, words = WRONG[what]
    report = exact_report()
    spoil(report)
    (failure,) = report.failures
    assert words in failure
    assert report.headline == "NOT EXACT"
    assert f"Verdict: NOT EXACT; {failure}." in report.text()
    record = json.loads(json.dumps(report.record(), allow_nan=False))
    assert record["exact"] is False
    assert record["verdict"] == "NOT EXACT"
    if what == "tree passes":  # JSON has no infinity
        assert record["errors"][1]["tree"] == [None, None]


def test_a_difference_is_shown_with_both_scores() -> None:
    llm = LLM.from_model(tiny_model("llama"))
    plain = llm.generate(
        [5, 6, 7], 8, "autoregressive", sampling=GREEDY["greedy"], ignore_eos=True
    ).token_ids
    assert difference(llm, [5, 6, 7], plain, plain, GREEDY["greedy"]) == (8, None)
    other = (plain[3] + 1) % VOCAB
    changed = [*plain[:3], other, *plain[4:]]
    place, line = difference(llm, [5, 6, 7], plain, changed, GREEDY["greedy"])
    assert place == 3
    assert line is not None
    assert line.startswith(f"new token 3: '{other}' ({other}), score ")
    assert f"instead of '{plain[3]}' ({plain[3]})" in line
    scores = [float(part.split()[0].rstrip(",")) for part in line.split("score ")[1:]]
    assert scores[0] < scores[1]


def test_an_audit_names_what_it_could_not_run() -> None:
    """A strategy that runs on one prompt and not on the next has not passed."""
    llm = LLM.from_model(tiny_model("llama"))
    real = llm.generate

    def generate(prompt: list[int], count: int, strategy: str, *args: object, **kwargs: object):
        if strategy == "magicdec" and len(prompt) > 8:
            raise InputError("prompt is too long")
        return real(prompt, count, strategy, *args, **kwargs)  # type: ignore[arg-type]

    llm.generate = generate  # type: ignore[method-assign]
    prompts: list[str | list[int]] = [[5, 6, 7], [i % VOCAB for i in range(20)]]
    strategies = variants("all", {})
    del strategies["auto"]
    report = audit(llm, strategies, prompts, GREEDY, 8)
    assert set(report.skipped) == {"medusa", "triforce", "magicdec"}
    assert any(c.strategy == "magicdec" for c in report.comparisons)
    assert report.headline == "exact; not run: medusa, triforce, magicdec"
    with pytest.raises(InputError, match="too long"):
        audit(llm, variants("magicdec", {}), prompts, GREEDY, 8)


def test_a_strategy_that_drafted_nothing_was_not_run() -> None:
    """Its passes are those of plain decoding: equal tokens would be no proof of anything."""
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    idle = {"auto": {"draft": "hidden", "ngrams": 0}}  # no heads, no text: nothing to do
    strategies = {**idle, "magicdec": {"budget": 64}, "autoregressive": {}}
    report = audit(llm, strategies, [[5, 6, 7]], GREEDY, 8)
    assert report.skipped == {"auto": "it drafted nothing on these texts"}
    assert report.headline == "exact; not run: auto"
    drafted = {c.strategy: c.drafted for c in report.comparisons}
    assert drafted["auto"] == 0
    assert drafted["autoregressive"] == 0
    assert drafted["magicdec"] > 0
    alone = audit(llm, idle, [[5, 6, 7]], GREEDY, 8)
    assert alone.failures == ["nothing was compared"]
    assert alone.headline == "NOT EXACT"
