"""The page of help texts can be made; what the docs name exists; summaries promise what holds."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import tokenswift
from tests.cli.conftest import Call
from tokenswift.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


def test_the_page_of_help_texts_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make docs`` writes it: every command, and every part of one, with its help."""
    monkeypatch.setenv("COLUMNS", "")  # which the script sets
    shown = runpy.run_path(str(ROOT / "scripts" / "cli_docs.py"))["page"]()
    for command in (*(name.replace("_", "-") for name in COMMANDS), "bench run", "bench report"):
        assert f"## tokenswift {command}\n\n```text\nusage: tokenswift {command} " in shown


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "plan", "roofline", "demo", "audit"])
def test_an_option_that_has_another_name_now_is_not_shown(cli: Call, command: str) -> None:
    shown = cli(command, "--help").out
    assert "--dtype" in shown and "--activations" not in shown


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
