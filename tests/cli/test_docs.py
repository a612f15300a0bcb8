"""The help texts in docs/cli.md are the program's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.cli.main import COMMANDS

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.mark.parametrize("command", [name.replace("_", "-") for name in COMMANDS])
def test_help_in_the_docs(cli: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = cli(command, "--help")
    assert shown.code == 0
    assert f"```text\n{shown.out.rstrip()}\n```" in DOCS.read_text(encoding="utf-8")
