"""What the docs say of the commands, and no other test looks at: options, defaults, signals, the
demo, chats without a seed, pipes that stay open, and the text before damage."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, Terminal, chatty_model, interrupted
from tokenswift.cli import chat, measure, progress
from tokenswift.cli.main import COMMANDS, build_parser
from tokenswift.cli.progress import Stages
from tokenswift.cli.prompts import piped_text
from tokenswift.cli.results import write_text
from tokenswift.cli.signals import Signals
from tokenswift.config.sampling import ANSWERS, CONTINUED, PAPER

DOCS = Path(__file__).parents[2] / "docs"


def actions() -> list[tuple[str, argparse.Action]]:
    """Every option of every command."""
    parser = build_parser()
    (choices,) = (one.choices for one in parser._actions if isinstance(one.choices, dict))
    return [(name, action) for name in COMMANDS for action in choices[name]._actions]


def test_every_option_says_what_it_is() -> None:
    for command, action in actions():
        text = vars(action).get("full_help", action.help)
        assert text, (command, action.dest)
        assert text != argparse.SUPPRESS, (command, action.dest)


def test_an_option_takes_the_same_in_every_command() -> None:
    """By placeholder and number of values; what it is for cannot be told by a program. ``--out`` is
    a folder of texts, and what a training writes."""
    known: dict[str, tuple[object, object]] = {}
    for command, action in actions():
        for name in {*action.option_strings} - {"--out"}:
            takes = (action.metavar, action.nargs)
            assert known.setdefault(name, takes) == takes, (command, name)


@pytest.mark.parametrize("name", ["temperature", "min_p", "dry_multiplier", "repetition_penalty"])
def test_the_docs_say_the_defaults_of_sampling(name: str) -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `--{name.replace('_', '-')}` \| ([\d.]+)[^|]*\| ([\d.]+)", text, re.M)
    assert row is not None
    assert float(row[1]) == getattr(ANSWERS, name)
    assert float(row[2]) == getattr(CONTINUED, name)


def test_the_docs_say_the_papers_sampling() -> None:
    text = " ".join((DOCS / "commands.md").read_text(encoding="utf-8").split())
    sentence = f"min-p {PAPER['min_p']} and a repetition penalty of {PAPER['repetition_penalty']}"
    assert sentence in text
    assert f"over the last {CONTINUED.penalty_window:,} tokens" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number: int) -> None:
    """As under nohup, and in background jobs of a shell."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), number)
            signals.check()
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_demo_whose_texts_differ_fails(
    cli: Call, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_measure = measure.measure

    def differ(*args: Any, **more: Any) -> measure.Measurement:
        measurement = real_measure(*args, **more)
        measurement["identical"] = False
        return measurement

    monkeypatch.setattr(measure, "measure", differ)
    done = cli("demo", "--model", tiny, "-n", 4)
    assert done.code == 1
    assert done.err.endswith("error: the two texts differ\n")
    assert "identical: no" in done.out


def test_a_chat_without_a_seed_varies_and_says_what_repeats_it(cli: Call, tmp_path: Path) -> None:
    chatty = chatty_model(tmp_path / "chatty", 512)
    Path("in").write_text("hello\n")
    argv = ("chat", "--model", chatty, "-n", 40, "--logit-bias", "257=-100")
    one = cli(*argv, "-v", stdin=Path("in"))
    other = cli(*argv, stdin=Path("in"))
    seed = re.search(r"; --seed (\d+) repeats the answers", one.err)
    assert seed is not None
    assert "repeats the answers" not in other.err
    assert one.out != other.out
    assert cli(*argv, "--seed", seed[1], stdin=Path("in")).out == one.out


def test_a_line_says_that_a_pipe_stands_before_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever started the program may have left it open: the line says how to leave it out."""
    read, write = os.pipe()
    os.write(write, b"text")
    os.close(write)
    caplog.set_level(logging.INFO)
    with os.fdopen(read) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert piped_text(has_prompt=True) == "text"
    line = "reading standard input, which stands before PROMPT (</dev/null leaves it out)"
    assert caplog.messages == [line]


def test_the_text_before_damage_is_given(cli: Call, tiny: Path) -> None:
    argv = ("--model", tiny, "-n", 60, "--ignore-eos", "--continue", "--quiet")
    text = cli("generate", "hello", *argv, "--run-dir", "r").out
    journal = Path("r/journal")
    data = journal.read_bytes()
    journal.write_bytes(data + b"00000003 00000000 abc\nmore\n")
    done = cli("runs", "r", "--text")
    assert done.code == 0
    assert done.out.rstrip("\n") == text.rstrip("\n")
    assert done.err == f"the journal is damaged at byte {len(data)}; what is before it is taken\n"
    assert f"damaged at byte {len(data)}" in cli("runs", "r").out


def test_a_pipe_is_written_to_directly_and_a_file_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "record\n")
    assert os.read(handle, 100) == b"record\n"
    os.close(handle)
    write_text(Path("/dev/null"), "record\n")
    file = tmp_path / "file"
    file.write_text("old")
    before = file.stat().st_ino
    write_text(file, "new")
    assert file.read_text() == "new"
    assert file.stat().st_ino != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.parametrize(
    ("name", "value", "moves"), [("NO_COLOR", "1", False), ("TERM", "dumb", False), ("X", "", True)]
)
def test_progress_moves_where_the_terminal_takes_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, moves: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    lines: list[object] = []
    monkeypatch.setattr(progress, "_moving_line", lambda: lines.append(1))
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    Stages()("prompt", 1, 2)
    assert bool(lines) == moves
    lines.clear()
    Stages(quiet=True)("prompt", 1, 2)
    assert lines == []


# ---- a chat, in a terminal -----------------------------------------------------------------------


class Typed:
    """What stands for the lines that somebody types; an exception is raised instead."""

    def __init__(self, *events: str | BaseException) -> None:
        self.events = [*events]

    def __call__(self) -> str:
        event = self.events.pop(0)
        if isinstance(event, BaseException):
            raise event
        return event


def test_a_chat_in_a_terminal_goes_on_after_errors(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is none, Ctrl-C at the prompt, a file that is there; Ctrl-D ends it."""
    chatty = chatty_model(tmp_path / "chatty", 512)
    monkeypatch.setattr(
        chat,
        "editor",
        lambda: Typed(
            "/nope", KeyboardInterrupt(), "/usr/bin is what?", "/save a", "/save a", EOFError()
        ),
    )
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    argv = ["chat", "--model", str(chatty), "-n", "40", "--logit-bias", "257=-100"]
    args = build_parser().parse_args(argv)
    lines: list[str] = []
    monkeypatch.setattr(chat.logger, "error", lambda text, *rest: lines.append(text % rest))
    monkeypatch.setattr(sys, "stdin", Terminal(sys.stdin))
    assert chat.run(args) == 0
    assert [line.partition(";")[0] for line in lines] == [
        "error: /nope is not a command",
        "error: /save a cannot be written (File exists)",
    ]
    message = json.loads(Path("a").read_text(encoding="utf-8"))[0]
    assert message == {"role": "user", "content": "/usr/bin is what?"}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_chat(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    chatty = chatty_model(tmp_path / "chatty", 512)
    Path("in").write_text("hello\nagain\n")
    argv = ("chat", "--model", chatty, "-n", 40, "--logit-bias", "257=-100", "--quiet")
    with monkeypatch.context() as patch:
        interrupted(patch, 3, number)
        done = cli(*argv, stdin=Path("in"))
    assert done.code == code
    assert done.err.count("\n") == 1
