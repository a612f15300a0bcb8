"""Help texts in docs/cli.md are the program's; what the docs name exists; summaries promise what holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import tokenswift
from tests.cli.conftest import Call
from tokenswift.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "cli.md"


SHOWN = [name.replace("_", "-") for name in COMMANDS]


@pytest.mark.parametrize("command", SHOWN)
def test_help_in_the_docs(cli: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "86")
    shown = cli(*command.split(), "--help")
    assert shown.code == 0
    assert f"```text\n{shown.out.rstrip()}\n```" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "plan", "roofline", "demo", "audit"])
def test_an_option_that_has_another_name_now_is_not_shown(cli: Call, command: str) -> None:
    shown = cli(command, "--help").out
    assert "--dtype" in shown and "--activations" not in shown
    assert "--activations" not in DOCS.read_text(encoding="utf-8")


def test_sources_named_in_the_docs_exist() -> None:
    found = 0
    for page in ("algorithm.md", "exactness.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text):
            assert any((ROOT / top / name).exists() for top in ("src/tokenswift", "")), f"{page}: {name}"
            found += 1
    assert found > 10


def test_the_summaries_promise_no_speed() -> None:
    """How much faster a run is depends on model, device and text: it is for the benchmarks to say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in (project["description"], tokenswift.__doc__ or ""):
        assert "same output" in text and "faster" not in text
