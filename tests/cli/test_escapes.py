"""Control characters in a text: visible on a terminal, unchanged everywhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, Outcome, Terminal, chatty_model
from tokenswift.cli.escapes import COMMANDING, visible

LENGTH = ("--max-new-tokens", "120", "--ignore-eos", "--seed", "3")
NASTY = {
    "\x1b]0;title\x07": "\\u001b]0;title\\u0007",  # OSC: the window's title
    "\x1b[2J\x1b[31m": "\\u001b[2J\\u001b[31m",  # CSI
    "\x9b2J\x9d0;t\x9c": "\\u009b2J\\u009d0;t\\u009c",  # the same as C1
    "\x1bP$q\x1b\\": "\\u001bP$q\\u001b\\",  # DCS
    "over\rwritten\x08\x7f": "over\\u000dwritten\\u0008\\u007f",
    "\u202egnp.exe\u202c \u2066x\u2069": "\\u202egnp.exe\\u202c \\u2066x\\u2069",
    "a\u2028b\U000e0041": "a\\u2028b\\udb40\\udc41",
    "tab\tline\nÜber 日本 שלום 👩\u200d🚀 \u00a0": "tab\tline\nÜber 日本 שלום 👩\u200d🚀 \u00a0",
}


@pytest.mark.parametrize("text", NASTY)
def test_each_kind(text: str) -> None:
    assert visible(text) == NASTY[text]
    assert "".join(map(visible, text)) == NASTY[text]  # split over steps, in the worst way


@pytest.fixture
def roomy(tmp_path: Path) -> Path:
    """A tiny model with a chat template, whose text is any bytes at all."""
    return chatty_model(tmp_path / "model", 8192)


def check(shown: str, raw: str, piped: str) -> None:
    """What a terminal, a terminal with --raw-output and a pipe got."""
    assert COMMANDING.search(piped), "the text has nothing to show"
    assert raw == piped and shown == visible(piped)


def three_ways(cli: Call, monkeypatch: pytest.MonkeyPatch, *argv: object, **more: Any) -> list[Outcome]:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal(sys.stdout))
        terminals = [cli(*argv, **more), cli(*argv, "--raw-output", **more)]
    found = [*terminals, cli(*argv, **more)]
    assert [done.code for done in found] == [0, 0, 0], found
    return found


def test_generate_and_its_record(cli: Call, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("generate", "hello", "--raw", "--model", roomy, *LENGTH, "--quiet")
    check(*(done.out for done in three_ways(cli, monkeypatch, *argv)))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal(sys.stdout))
        done = cli(*argv, "--json", "-")
    assert not COMMANDING.search(done.out)
    assert COMMANDING.search(json.loads(done.out)["text"])


def test_chat(cli: Call, roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_text("Hello\n")
    argv = ("chat", "--model", roomy, "--max-new-tokens", "120", "--temperature", "1", "--quiet", "-s", "3")
    check(*(done.out for done in three_ways(cli, monkeypatch, *argv, stdin=tmp_path / "in")))
