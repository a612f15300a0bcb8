"""Control characters in a text: visible on a terminal, unchanged everywhere else."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Call, Outcome, Terminal, chatty_model, on_a_terminal
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


@given(st.text())
def test_nothing_commands_and_json_stays_json(text: str) -> None:
    shown = visible(text)
    assert not COMMANDING.search(shown)
    assert all(unicodedata.category(c) != "Cc" or c in "\t\n" for c in shown)
    assert json.loads(visible(json.dumps(text, ensure_ascii=False))) == text
    if not COMMANDING.search(text):
        assert shown == text


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


def test_resume(cli: Call, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("generate", "hello", "--raw", "--model", roomy, *LENGTH, "--quiet", "--run-dir", "run")
    assert cli(*argv).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal(sys.stdout))
        shown = cli("resume", "run", "--max-new-tokens", "300", "--quiet")
        raw = cli("resume", "run", "--max-new-tokens", "600", "--quiet", "--raw-output")
    assert shown.code == raw.code == 0
    assert shown.out and not COMMANDING.search(shown.out) and COMMANDING.search(raw.out)


def test_demo(cli: Call, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("demo", "--model", roomy, "--max-new-tokens", "120", "--quiet")
    shown = [done.out for done in three_ways(cli, monkeypatch, *argv)]
    texts = [re.split("(?:\x1b\\[1m)?strategy\\b", text)[0] for text in shown]
    check(*texts)


@pytest.mark.parametrize("raw", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_real_terminal(roomy: Path, raw: bool) -> None:
    argv = ["generate", "hello", "--raw", "--model", str(roomy), *LENGTH, "--output", str(roomy / "text")]
    done = on_a_terminal(*argv, *(["--raw-output"] if raw else []), streams=(1,))
    text = (roomy / "text").read_bytes().decode()
    expected = (text if raw else visible(text)).encode()
    assert done.code == 0 and done.screen.removesuffix(b"\n") == expected.removesuffix(b"\n")


def test_messages_command_no_terminal_either() -> None:
    done = on_a_terminal("generate", "hi", "--output", "\x1b]0;t\x07/x")
    assert done.code == 2 and b"\x1b" not in done.screen and b"\\u001b]0;t\\u0007" in done.screen
