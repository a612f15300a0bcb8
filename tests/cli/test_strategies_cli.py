"""``tokenswift strategies`` and the options of every strategy on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.spec.methods.table import STRATEGIES


def test_the_list_names_every_strategy_option_and_paper(cli: Call) -> None:
    outcome = cli("strategies")
    assert outcome.code == 0 and outcome.err == ""
    for name, entry in STRATEGIES.items():
        assert f"{name}\n  {entry.summary}" in outcome.out
    for words in ("arXiv 2502.18890", "--gamma", "--draft-model", "option  ", "needs  nothing"):
        assert words in outcome.out


def test_one_strategy_as_json(cli: Call) -> None:
    outcome = cli("strategies", "triforce", "--json")
    (record,) = json.loads(outcome.out)["strategies"]
    assert record["name"] == "triforce"
    assert {"gamma", "inner_gamma", "chunk", "refresh"} <= {o["name"] for o in record["options"]}


def test_an_unknown_strategy(cli: Call) -> None:
    outcome = cli("strategies", "hydra")
    assert (
        outcome.code == 2 and "strategy is 'hydra'; valid: auto, autoregressive, tokenswift" in outcome.error
    )


def test_the_same_text_by_every_strategy_without_heads(cli: Call, tiny: Path) -> None:
    model = ("--model", tiny, "--max-new-tokens", "30", "--ignore-eos", "--quiet")
    plain = cli("generate", "hello there", *model, "--strategy", "autoregressive")
    assert plain.code == 0, plain.err
    for argv in (
        ("magicdec", "--gamma", "2", "--kv", "streaming", "--budget", "20"),
        ("magicdec", "--draft-model", tiny, "--budget", "20"),
        ("triforce", "--draft-model", tiny, "--budget", "20", "--inner-gamma", "3"),
    ):
        got = cli("generate", "hello there", *model, "--strategy", *argv)
        assert (got.code, got.out) == (0, plain.out), argv


def test_the_old_name_of_automatic_drafting(cli: Call, tiny: Path) -> None:
    """``--strategy tokenswift`` without a tree runs ``auto`` and says so; with one it is the paper's."""
    model = ("--model", tiny, "--heads", "none", "--max-new-tokens", "12", "--ignore-eos", "--json", "-")
    found = {}
    for argv in (
        (),
        ("--strategy", "tokenswift"),
        ("--strategy", "tokenswift", "--tree", "1,2"),
        ("--tree", "2"),
    ):
        got = cli("generate", "hello there", *model, *argv)
        assert got.code == 0, got.err
        found[argv] = json.loads(got.out)["strategy"], got.err.count("is strategy auto, which runs")
    assert list(found.values()) == [("auto", 0), ("auto", 1), ("tokenswift", 0), ("tokenswift", 0)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("triforce",), "--draft-model"),
        (("triforce", "--draft-model", "nowhere"), "nowhere"),
        (("magicdec", "--gamma", "0"), "--gamma is 0"),
        (("magicdec", "--sinks", "9", "--budget", "8"), "--budget is 8"),
        (("medusa",), "medusa needs heads of kind medusa"),
        (("magicdec", "--tree", "1,2"), "tree"),
    ],
)
def test_bad_input(cli: Call, tiny: Path, argv: tuple[str, ...], words: str) -> None:
    outcome = cli("generate", "hi", "--model", tiny, "--strategy", *argv)
    assert outcome.code == 2 and outcome.out == ""
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last, last
