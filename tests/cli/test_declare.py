"""Options from dataclasses: their names, kinds, texts and defaults, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from tokenswift.cli.declare import Parser, add_options, command
from tokenswift.config.fields import SHOWN, AtLeast, Option


@dataclass(frozen=True)
class Base:
    """Options of two commands.

    Attributes:
        quiet: say nothing
    """

    quiet: Annotated[bool, SHOWN] = False


@dataclass(frozen=True, kw_only=True)
class Some(Base):
    """Options of one.

    Attributes:
        top_k: keep 50% of ``k`` tokens,
            not more: none
        share, rate: of the whole.
        place: a name
    """

    top_k: Annotated[int, AtLeast(1), SHOWN] = 3
    share: float | None = None
    rate: Annotated[float, Option("R", names=("-r", "--pace"))] = 0.5
    place: Annotated[str, Option("NAME", positional=True)]


def test_help_in_two_levels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, a default where the text says none; what is not usual with --help-all alone."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(args: object) -> int:
        """What it does."""
        return 0

    parser = command(Parser(prog="tokenswift").add_subparsers(), "p", run, "a command", "NAME")
    add_options(parser, Some)
    shown = []
    for how in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parser.parse_args([how])
        shown.append(" ".join(capsys.readouterr().out.split()))
    usual, every = shown
    assert usual.startswith("usage: tokenswift p [options] NAME What it does.")
    assert "--top-k N keep 50% of k tokens, not more: none; default: 3" in usual
    assert "--pace" not in usual
    assert "-r R, --pace R of the whole; default: 0.5" in every
