"""The pages that are not kept can be pages."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.cli.main import COMMANDS
from tokenswift.config.strategies import OPTIONS

ROOT = Path(__file__).parents[2]


def test_the_pages_that_are_not_kept_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make docs`` writes every command's help, and README, whose links lead to what the site
    has."""
    monkeypatch.setenv("COLUMNS", "")  # which the script sets
    pages = runpy.run_path(str(ROOT / "tools" / "pages.py"))
    links = re.findall(r"\]\((?!https?:)([^)#]+)", pages["start"]())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
    shown = pages["helps"]()
    for command in COMMANDS:
        assert f"## tokenswift {command}\n\n```text\nusage: tokenswift {command} " in shown
    options = [one.name.replace("_", "-") for kind in OPTIONS.values() for one in fields(kind)]
    assert all(f"--{name} " in shown for name in options)  # what a help alone does not show
    words = " ".join(shown.split())
    assert "(triforce: 6; magicdec: 3)" in words
    assert "NOT lossless" in words


#: lines of a help at 80 columns, at most
SCREEN = 60


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_can_be_taken_in(cli: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """On a screen, a few words each; --help-all shows all of these and others."""
    monkeypatch.setenv("COLUMNS", "80")
    few, every = (cli(command, how) for how in ("--help", "--help-all"))
    assert few.code == every.code == 0
    shown, more = (
        set(re.findall(r"^  (?:-\w .*)?(--[\w-]+)", done.out, re.MULTILINE))
        for done in (few, every)
    )
    assert len(few.out.splitlines()) <= SCREEN
    assert shown <= more
    few_options = ("models", "resume", "runs", "train")
    assert {"--debug", "--kv-cache-dtype"} <= more or command in few_options
    assert max(map(len, few.out.splitlines())) <= 80
