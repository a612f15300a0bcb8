"""Options from dataclasses: their names, kinds, texts and defaults, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tokenswift.cli.declare import Parser, add_options, command, option


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
        place: a name
    """

    top_k: int = option(3, least=1)
    share: float | None = option(None)
    rate: float = option(0.5, "R", names=("-r", "--pace"))
    place: str = option(metavar="NAME", place=True)


def test_help_in_two_levels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, a default where the text says none; what is not usual with --help-all alone."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(args: object) -> int:
        """What it does."""
        return 0

    made = command(Parser(prog="tokenswift").add_subparsers(), "p", run, "a command", "NAME")
    add_options(made, Some)
    shown = []
    for how in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            made.parse_args([how])
        shown.append(" ".join(capsys.readouterr().out.split()))
    usual, every = shown
    assert usual.startswith("usage: tokenswift p [options] NAME What it does.")
    assert "--top-k N keep 50% of k tokens, not more: none; default: 3" in usual
    assert "--pace" not in usual and "-r R, --pace R of the whole; default: 0.5" in every
