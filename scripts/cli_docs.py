"""Write the program's own help texts to docs/cli.md, a page of the site: ``make docs`` calls this."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

from tokenswift.cli.main import Parser, build_parser, main, subparsers_of

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
INTRODUCTION = "Exit codes, and whatever else holds for all commands: [The command line](commands.md)."
WIDTH = "86"  # columns, which the site shows whole


def commands(parser: Parser) -> Iterator[str]:
    """Every command, those with parts of their own followed by each part: ``bench``, ``bench run``."""
    for name, found in subparsers_of(parser).items():
        yield name
        for part in subparsers_of(found):
            yield f"{name} {part}"


def output_of(*argv: str) -> str:
    """What a call of the command line prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(argv)
    if code != 0:
        raise RuntimeError(f"tokenswift {' '.join(argv)} ended with exit code {code}")
    return out.getvalue().rstrip()


def page() -> str:
    """The page, in Markdown."""
    os.environ["COLUMNS"] = WIDTH
    parts = ["# Every command's options", INTRODUCTION]
    for command in commands(build_parser()[0]):
        how = "--help-all" if "--help-all" in output_of(*command.split(), "--help") else "--help"
        parts += [f"## tokenswift {command}", f"```text\n{output_of(*command.split(), how)}\n```"]
    parts += ["## Options of methods", f"```text\n{output_of('methods')}\n```"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
