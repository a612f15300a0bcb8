"""Options from dataclasses: their names, kinds, texts and defaults, and what is refused."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenswift.cli.declare import add_options, check_options, option, texts_of
from tokenswift.cli.generate import Ends
from tokenswift.cli.main import COMMANDS, Parser, build_parser, subparsers_of
from tokenswift.cli.options import DEFAULT_MODEL, Model, Source
from tokenswift.config import ANSWERS, LoopOptions
from tokenswift.types import InputError


@dataclass(frozen=True)
class Base:
    """Options of two commands.

    Attributes:
        quiet: say nothing
    """

    quiet: bool = option(False)


@dataclass(frozen=True, kw_only=True)
class Some(Base):
    """Options of one.

    Attributes:
        top_k: keep 50% of ``k`` tokens,
            not more: none
        share, rate: of the whole.
        out: where it goes; default: nowhere
        place: a name
        word: several
    """

    top_k: int = option(3, least=1, earlier="--k")
    share: float | None = option(None)
    rate: float = option(0.5, "R", names=("-r",))
    out: Path | None = option(None)
    place: str = option(metavar="NAME", place=True)
    word: list[str] = option((), action="append")


def parser(**more: object) -> Parser:
    made = Parser(prog="p")
    add_options(made, Some, **more)  # type: ignore[arg-type]
    return made


def test_a_field_is_an_option() -> None:
    argv = "here --top-k 4 -r 2 --out a --word x --word y --quiet".split()
    assert vars(parser().parse_args(argv)) == {
        "top_k": 4, "rate": 2.0, "out": Path("a"), "word": ["x", "y"], "quiet": True, "place": "here",
        "share": None,
    }  # fmt: skip
    plain = parser().parse_args(["here"])
    assert (plain.top_k, plain.rate, plain.word, plain.quiet) == (3, 0.5, [], False)
    assert parser().parse_args(["here", "--k", "9"]).top_k == 9
    assert parser(unset=True).parse_args(["here"]).top_k is None
    assert parser(top_k=8).parse_args(["here"]).top_k == 8
    assert not hasattr(parser(only=("place", "rate")).parse_args(["here"]), "top_k")


def test_help_is_the_docstring_with_the_default() -> None:
    assert texts_of(Some)["quiet"] == "say nothing" and texts_of(Some)["rate"] == "of the whole"
    shown = " ".join(parser(texts={"word": "a word"}).format_help().split())
    assert "--top-k N keep 50% of k tokens, not more: none; default: 3" in shown
    assert "-r, --rate R of the whole; default: 0.5" in shown and "--share X of the whole" in shown
    assert "--out FILE where it goes; default: nowhere" in shown and "--word NAME a word" in shown
    assert "--k " not in shown


def test_the_least_of_a_number() -> None:
    check_options(parser().parse_args(["here"]), Some)
    with pytest.raises(InputError, match="top_k is 0; valid: an integer of at least 1"):
        check_options(parser().parse_args(["here", "--top-k", "0"]), Some)
    with pytest.raises(InputError, match="--top-k is 'x'; valid: an integer"):
        parser().parse_args(["here", "--top-k", "x"])


def test_every_option_says_what_it_is() -> None:
    for command, found in subparsers_of(build_parser()[0]).items():
        for action in found._actions:
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction):
                assert len(action.help or "") > 5, f"{command} {action.dest}"


@pytest.mark.parametrize("words", [("generate", "hi"), ("models",), ("train-heads", "--help")])
def test_the_parser_of_one_command_is_that_of_all(words: tuple[str, ...]) -> None:
    whole, (made, runs) = subparsers_of(build_parser()[0]), build_parser(words)
    (name,) = subparsers_of(made)
    assert name == words[0] and list(runs) == [name]
    assert subparsers_of(made)[name].format_help() == whole[name].format_help()


@pytest.mark.parametrize("words", [(), ("--help",), ("generat",), ("--version", "generate")])
def test_a_line_that_begins_with_no_command_has_all(words: tuple[str, ...]) -> None:
    assert list(build_parser(words)[1]) == [name.replace("_", "-") for name in COMMANDS]


def test_docstrings_name_the_defaults_of_the_code() -> None:
    """Where a text says a value that stands elsewhere too."""
    usual = f"else temperature {ANSWERS.temperature}, min-p {ANSWERS.min_p} and no penalty"
    assert usual in texts_of(Source)["sampling"] and ANSWERS.window == 0
    assert f"default: {DEFAULT_MODEL}," in texts_of(Model)["model"]
    loops = LoopOptions()
    words = f"at least {loops.min_tokens} tokens in all; default: {loops.min_pattern_size},"
    words += f"{loops.max_pattern_size},{loops.min_count}"
    assert words in texts_of(Ends)["loop_patterns"]
