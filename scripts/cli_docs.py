"""Put the program's own help texts into docs/cli.md (checked by tests/cli/test_docs.py).

A block is a ``text`` fence whose first line is ``usage: tokenswift COMMAND …``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "cli.md"


def help_of(command: str) -> str:
    """The help text at 86 columns, which the site shows whole."""
    os.environ["COLUMNS"] = "86"
    from tokenswift.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([*command.split(), "--help"])
    return out.getvalue().rstrip()


def main() -> None:
    """Rewrite every block."""
    block = re.compile(r"```text\nusage: tokenswift ([\w-]+).*?\n```", re.DOTALL)
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(block.sub(lambda m: f"```text\n{help_of(m[1])}\n```", text), encoding="utf-8")


if __name__ == "__main__":
    main()
