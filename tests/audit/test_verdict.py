"""The audit's verdict: every finding can fail it, and nothing that was not run counts as passed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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


def report() -> Report:
    """A report in which everything is well."""
    texts = [EQUAL, replace(EQUAL, strategy="triforce")]
    return Report("tiny", "float32", "cpu", [NUMBERS], texts)


def test_a_report_without_findings_is_exact() -> None:
    found = report()
    assert found.failures == [] and found.headline == "exact" and found.record()["exact"] is True
    assert "medusa, greedy: 1 text, 32 tokens equal, 5 drafted" in found.text()
    assert found.text().endswith("\nVerdict: exact.")


INFINITE = (math.inf, math.inf)
DIFFERS = replace(EQUAL, seed=3, difference="new token 5: 'a'")
FAR = replace(NUMBERS, one_row=(7.5, 2.0))
WRONG: dict[str, tuple[Callable[[Report], Any], str]] = {
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
    found, (spoil, words) = report(), WRONG[what]
    spoil(found)
    assert len(found.failures) == 1 and words in found.failures[0], found.failures
    assert (
        found.headline == "NOT EXACT"
        and f"Verdict: NOT EXACT; {found.failures[0]}." in found.text()
    )
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["exact"] is False and record["verdict"] == "NOT EXACT"
    if what == "tree passes":  # JSON has no infinity
        assert record["errors"][1]["tree"] == [None, None]


def test_a_difference_is_shown_with_both_scores() -> None:
    llm = LLM.from_model(tiny_model("llama"))
    plain = llm.generate(
        [5, 6, 7], 8, "autoregressive", sampling=GREEDY["greedy"], ignore_eos=True
    ).token_ids
    assert difference(llm, [5, 6, 7], plain, plain, GREEDY["greedy"]) == (8, None)
    other = (plain[3] + 1) % VOCAB
    place, told = difference(
        llm, [5, 6, 7], plain, [*plain[:3], other, *plain[4:]], GREEDY["greedy"]
    )
    assert (
        place == 3
        and told is not None
        and told.startswith(f"new token 3: '{other}' ({other}), score ")
    )
    other_score, own_score = (
        float(part.split()[0].rstrip(",")) for part in told.split("score ")[1:]
    )
    assert f"instead of '{plain[3]}' ({plain[3]})" in told and other_score < own_score


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
    known = {name: given for name, given in variants("all", {}).items() if name != "auto"}
    found = audit(llm, known, prompts, GREEDY, 8)
    assert set(found.skipped) == {"medusa", "triforce", "magicdec"}
    assert any(c.strategy == "magicdec" for c in found.comparisons)
    assert found.headline == "exact; not run: medusa, triforce, magicdec"
    with pytest.raises(InputError, match="too long"):
        audit(llm, variants("magicdec", {}), prompts, GREEDY, 8)


def test_a_strategy_that_drafted_nothing_was_not_run() -> None:
    """Its passes are those of plain decoding: equal tokens would be no proof of anything."""
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    idle = {"auto": {"draft": "hidden", "ngrams": 0}}  # no heads, no text: nothing to do
    known = {**idle, "magicdec": {"budget": 64}, "autoregressive": {}}
    found = audit(llm, known, [[5, 6, 7]], GREEDY, 8)
    assert found.skipped == {"auto": "it drafted nothing on these texts"}
    assert found.headline == "exact; not run: auto"
    drafted = {c.strategy: c.drafted for c in found.comparisons}
    assert drafted["auto"] == drafted["autoregressive"] == 0 < drafted["magicdec"]
    alone = audit(llm, idle, [[5, 6, 7]], GREEDY, 8)
    assert alone.failures == ["nothing was compared"] and alone.headline == "NOT EXACT"
