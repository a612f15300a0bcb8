"""Options from dataclasses: their names, kinds, texts and defaults, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenswift.cli.declare import Parser, add_options, option
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

    top_k: int = option(3, least=1)
    share: float | None = option(None)
    rate: float = option(0.5, "R", names=("-r",))
    out: Path | None = option(None)
    place: str = option(metavar="NAME", place=True)
    word: list[str] = option((), action="append")


def parser(**more: object) -> Parser:
    made = Parser(prog="p")
    add_options(made, Some, **more)  # type: ignore[arg-type]
    return made


def test_what_no_option_takes() -> None:
    for argv, words in (
        ("here --top-k 0", "--top-k is 0; valid: an integer of at least 1"),
        ("here --rate x", "--rate is 'x'; valid: a number"),
        ("here --wurd x", "unknown option --wurd; did you mean --word?"),
        ("here there", "unexpected argument 'there'"),
        ("", "the following arguments are required: NAME"),
    ):
        with pytest.raises(InputError) as caught:
            parser().parse_args(argv.split())
        assert str(caught.value).startswith(words), caught.value


def test_help_in_two_levels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and first long name, a default where the text says none; the rare ones with --help-all alone."""
    monkeypatch.setenv("COLUMNS", "80")
    made = parser(rare=("word",))
    made.complete()
    shown = []
    for how in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            made.parse_args([how])
        shown.append(capsys.readouterr().out)
    usual, every = shown
    assert usual.startswith("usage: p [options] NAME\n")
    assert "--top-k N" in usual and "keep 50% of k tokens, not more: none; default: 3" in " ".join(
        usual.split()
    )
    assert "-r, --rate R" in usual and "--word" not in usual and "--word" in every
