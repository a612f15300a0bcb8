"""Options of every strategy on the command line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.config import MagicDecOptions


def test_the_options_of_every_strategy(cli: Call) -> None:
    outcome = cli("generate", "--strategy", "all", "--method-option", "help")
    assert outcome.code == 0 and outcome.err == ""
    for words in ("magicdec\n", "gamma=N", "draft_model=NAME", "backend=B", "NOT lossless"):
        assert words in outcome.out


def test_an_unknown_method(cli: Call) -> None:
    for more in ((), ("--method-option", "help")):
        outcome = cli("generate", "hi", "--strategy", "hydra", *more)
        assert outcome.code == 2
        assert outcome.error.startswith("--strategy is 'hydra'; valid: auto, autoregressive, tokenswift")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "EAGLE-3"])
def test_eagle_is_a_drafter_of_auto(cli: Call, name: str) -> None:
    outcome = cli("generate", "hi", "--strategy", name)
    assert outcome.code == 2 and f"--strategy is '{name}'; valid: " in outcome.error
    assert "auto, with an EAGLE-3 drafter (--eagle PATH" in outcome.error


def test_help_on_the_options_of_a_method(cli: Call) -> None:
    """In any order, and without what the command would need else; of the command's own keys alone."""
    shown = cli("generate", "--method-option", "help", "--strategy", "magicdec")
    assert shown.code == 0 and shown.err == ""
    for key in (*(one.name for one in fields(MagicDecOptions)), "backend", "cuda_graphs"):
        assert f"  {key}=" in shown.out
    assert "chunk=" not in shown.out
    needed = cli("eval-heads", "--method-option", "help")
    assert needed.code == 0 and "backend=" in needed.out and "gamma=" not in needed.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("gama=3", ("--method-option gama ", "valid: ", "did you mean gamma?")),
        ("gamma=3", ("--method-option gamma is not an option of strategy auto", "valid: ngrams")),
        ("cache=dynamc", ("--method-option cache is 'dynamc'", "valid: full", "did you mean dynamic?")),
        ("tree=0", ("--method-option tree is '0'", "valid: integers")),
        ("budget", ("--method-option budget ", "valid: budget=N")),
        ("budget=16", ("--method-option budget is 16", "valid: more than the 16 sink tokens")),
        ("sinks=many", ("--method-option sinks is 'many'", "valid: an integer")),
        ("backend=fast", ("--method-option backend is 'fast'", "valid: auto, cpu, cuda, torch")),
        ("explain=no/where", ("--explain no/where", "valid: a writable file")),
    ],
)
def test_bad_options_of_a_method(cli: Call, tiny: Path, argv: str, words: tuple[str, ...]) -> None:
    outcome = cli("generate", "hi", "--model", tiny, "--method-option", argv)
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
        (("triforce",), "--method-option draft_model is not given"),
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
