"""``tokenswift audit``: verdict and exit code on sound and broken ground, the record, bad input."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Call

SHORT = ("-n", "12")


PROMPT = "It was a dark and stormy night"


def test_an_exact_model_passes(cli: Call, tiny: Path) -> None:
    done = cli("audit", "--model", tiny, PROMPT, "--seeds", "2", "--json", "a.json", *SHORT)
    assert done.code == 0, done
    assert "Verdict: exact; not run: medusa, triforce" in done.out
    assert "prompt 1 of 1" in done.err
    record = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert record["exact"]
    assert record["failures"] == []
    rows = record["comparisons"]
    sure = {"tokenswift", "magicdec"}
    drafted = {
        row["strategy"] for row in rows if row["drafted"]
    }  # adaptive drafting may find that none pays
    assert sure <= drafted <= sure | {"auto"}
    assert set(record["skipped"]) == {"medusa", "triforce", "auto"} - drafted
    assert record["verdict"] == f"exact; not run: {', '.join(record['skipped'])}"
    assert all(row["sound"] for row in record["errors"])
    labels = {row["strategy"] for row in record["comparisons"]}
    assert {"auto", "tokenswift"} <= labels
    texts = [row for row in record["comparisons"] if row["strategy"] == "tokenswift"]
    assert len(texts) == 2 + 1  # two seeds with sampling and one greedy text
    assert all(row["tokens"] == 12 for row in texts)
    assert record["dtype"] == "float32"
    assert record["versions"]["torch"]
    assert "PROMPT is empty" in cli("audit", " ", "--model", tiny).error


def test_the_published_rule_fails_the_audit(cli: Call, tiny: Path) -> None:
    arguments = ("--tree", "1,3,3,3", "--draft", "partial", "--acceptance", "published")
    done = cli("audit", "--model", tiny, PROMPT, *SHORT, "--strategy", "tokenswift", *arguments)
    assert done.code == 1
    assert "Verdict: NOT EXACT; tokenswift differs" in done.out
    last = done.err.splitlines()[-1]
    assert last.startswith("error: not exact: tokenswift differs")
    assert "new token" in last


def test_prompts_are_shortened_to_the_models_positions(cli: Call, tiny: Path) -> None:
    """The shipped prompts are longer than a small model's positions; that is said before anything
    runs."""
    done = cli(
        "audit",
        "--model",
        tiny,
        "--strategy",
        "magicdec",
        "--max-new-tokens",
        "8",
        "--json",
        "a.json",
    )
    assert done.code == 0, done
    short = "prompts are cut to their first 248 tokens (the model has 256 positions)"
    assert 0 < done.err.find(short) < done.err.index("plain decoding")
    assert json.loads(Path("a.json").read_text(encoding="utf-8"))["exact"]


def test_more_tokens_than_positions_are_refused_before_the_start(cli: Call, tiny: Path) -> None:
    done = cli("audit", "--model", tiny, PROMPT, "--max-new-tokens", "256")
    assert done.code == 2, done
    assert "plain decoding" not in done.err
    assert done.err.endswith(
        "error: --max-new-tokens is 256; valid: at most 255 (the model has 256 positions)\n"
    )
