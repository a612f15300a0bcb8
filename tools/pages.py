"""Write the pages of the site that are not kept: docs/index.md, which is README, and docs/cli.md,
every command's help. ``make docs`` calls this."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from tokenswift.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INTRODUCTION = (
    "Exit codes, and whatever else holds for all commands: [The command line](commands.md)."
)
WIDTH = "86"  # columns, which the site shows whole


def output_of(*argv: str) -> str:
    """What a call of the command line prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(argv)
    if code != 0:
        raise RuntimeError(f"tokenswift {' '.join(argv)} ended with exit code {code}")
    return out.getvalue().rstrip()


def start() -> str:
    """README as a page of the site: links lead to pages beside it; files that the site lacks are
    named."""
    text = re.sub(
        r"\bdocs/(?=[\w-]+\.(?:md|svg))", "", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    return re.sub(r"\[([^]]+)\]\((?:LICENSE|CHANGELOG\.md)\)", r"\1", text)


def helps() -> str:
    """Every command's help, in Markdown."""
    os.environ["COLUMNS"] = WIDTH
    parts = ["# Every command's options", INTRODUCTION]
    for command in COMMANDS:
        parts += [f"## tokenswift {command}", f"```text\n{output_of(command, '--help-all')}\n```"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for name, text in (("index.md", start()), ("cli.md", helps())):
        (DOCS / name).write_text(text, encoding="utf-8")
