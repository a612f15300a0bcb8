"""Options of every strategy on the command line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.config import OPTIONS


def test_the_options_of_every_strategy(cli: Call) -> None:
    """With the strategies that have each and their defaults, all of the options' names."""
    shown = " ".join(cli("generate", "--help-all").out.split())
    for kind in OPTIONS.values():
        assert all(f"--{one.name.replace('_', '-')} " in shown for one in fields(kind))
    for words in (
        "(triforce: 6; magicdec: 3)",
        "(auto; tokenswift, triforce, magicdec: 4096)",
        "NOT lossless",
    ):
        assert words in shown


def test_an_unknown_method(cli: Call) -> None:
    outcome = cli("generate", "hi", "--strategy", "hydra")
    assert outcome.code == 2
    assert outcome.error.startswith("--strategy is 'hydra'; valid: auto, autoregressive, tokenswift")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "EAGLE-3"])
def test_eagle_is_a_drafter_of_auto(cli: Call, name: str) -> None:
    outcome = cli("generate", "hi", "--strategy", name)
    assert outcome.code == 2 and f"--strategy is '{name}'; valid: " in outcome.error
    assert "auto, with an EAGLE-3 drafter (--eagle PATH" in outcome.error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--gama 3", ("unknown option --gama", "did you mean --gamma?")),
        ("--gamma 3", ("--gamma is not an option of strategy auto", "valid: ngrams")),
        ("--cache dynamc", ("--cache is 'dynamc'", "valid: full", "did you mean dynamic?")),
        ("--tree 0", ("--tree is '0'", "valid: integers")),
        ("--budget", ("--budget: expected one argument",)),
        ("--budget 16", ("--budget is 16", "valid: more than the 16 sink tokens")),
        ("--sinks many", ("--sinks is 'many'", "valid: an integer")),
        ("--backend fast", ("--backend is 'fast'", "valid: auto, cpu, cuda, torch")),
        ("--explain no/where", ("--explain no/where", "valid: a writable file")),
    ],
)
def test_bad_options_of_a_method(cli: Call, tiny: Path, argv: str, words: tuple[str, ...]) -> None:
    outcome = cli("generate", "hi", "--model", tiny, *argv.split())
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
    assert all(word in outcome.error for word in words), outcome.error


def test_adaptive_drafting_and_the_papers_method(cli: Call, tiny: Path) -> None:
    """What is named is what runs; a tree without ``--strategy tokenswift`` is an error that names it."""
    model = ("--model", tiny, "--heads", "none", "--max-new-tokens", "12", "--ignore-eos", "--json", "-")
    for argv in ((), ("--strategy", "tokenswift"), ("--strategy", "tokenswift", "--tree", "1,2")):
        got = cli("generate", "hello there", *model, *argv)
        assert got.code == 0, got.err
        record = json.loads(got.out)
        assert record["strategy"] == (argv[1] if argv else "auto")
        assert (record["drafting"] is None) == bool(argv)  # adaptive drafting alone gives an account
    refused = cli("generate", "hello there", *model, "--tree", "2")
    assert refused.code == 2 and "--tree" in refused.error and "strategy tokenswift" in refused.error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("triforce",), "--draft-model is not given"),
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
