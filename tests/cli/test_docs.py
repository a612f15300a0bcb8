"""The pages that are not kept can be made; what the docs name exists; summaries promise what holds."""

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


def test_the_pages_that_are_not_kept_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make docs`` writes every command's help, and README, whose links lead to what the site has."""
    monkeypatch.setenv("COLUMNS", "")  # which the script sets
    made = runpy.run_path(str(ROOT / "scripts" / "pages.py"))
    links = re.findall(r"\]\((?!https?:)([^)#]+)", made["start"]())
    assert len(links) > 10 and [link for link in links if not (ROOT / "docs" / link).is_file()] == []
    shown = made["helps"]()
    for command in (name.replace("_", "-") for name in COMMANDS):
        assert f"## tokenswift {command}\n\n```text\nusage: tokenswift {command} " in shown
    assert "--kv-cache-dtype" in shown and "draft_budget=B" in shown  # what a help alone does not show


#: how many options a help may show, and lines a group of them may have at 80 columns
MOST, SCREEN = 25, 24


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "resume", "plan", "roofline", "demo", "audit"]
)
def test_a_help_can_be_taken_in(cli: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Few options, in groups that fit a screen; --help-all shows all of these and others."""
    monkeypatch.setenv("COLUMNS", "80")
    few, every = (cli(command, how) for how in ("--help", "--help-all"))
    assert few.code == every.code == 0
    shown, more = (
        set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", done.out, re.MULTILINE)) for done in (few, every)
    )
    assert len(shown) <= MOST and shown < more
    assert "--debug" in more and not more & {"--at-once", "--budget", "--backend", "--activations"}
    assert max(len(part.splitlines()) for part in few.out.split("\n\n")) <= SCREEN
    assert max(map(len, few.out.splitlines())) <= 80


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
