"""A way to call the command line in this process and look at everything that it did."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift.cli.main import main
from tokenswift.engine.stream import Stream
from tokenswift.types import Step


@dataclass
class Outcome:
    """Exit code, both streams, and the names of the files in the working folder afterwards."""

    code: int
    out: str
    err: str
    files: list[str]

    @property
    def error(self) -> str:
        """The one error line (asserts that only what a command begins with stands before it)."""
        *first, last = self.err.splitlines()
        assert self.err.endswith("\n"), self.err
        assert last.startswith("error: ")
        assert all(line.startswith(("loading ", "auditing ", "reading ")) for line in first), (
            self.err
        )
        return last.removeprefix("error: ")


Call = Callable[..., Outcome]


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Call:
    """``cli("generate", "hi", "--seed", "1")`` runs in an empty working folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def call(*argv: object, stdin: Path | None = None) -> Outcome:
        with open(stdin or "/dev/null", encoding="utf-8") as handle:
            monkeypatch.setattr(sys, "stdin", handle)
            capsys.readouterr()  # what fixtures printed
            code = main([str(word) for word in argv])
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err, sorted(p.name for p in folder.rglob("*")))

    return call


@pytest.fixture
def tiny(tiny_folder: Callable[..., Path]) -> Path:
    """A tiny Llama: one token per byte, 260 tokens, 256 positions."""
    return tiny_folder()


def chatty_model(folder: Path, positions: int) -> Path:
    """A tiny Llama with a chat template; its tokenizer puts a BOS before every text."""
    tiny_model(max_position_embeddings=positions).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


class Terminal:
    """A real stream that says that it is a terminal."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def on_a_terminal(*argv: str) -> tuple[str, int]:
    """What a program of Python's writes to standard error, a terminal (which changes no byte); its
    exit code."""
    master, slave = pty.openpty()
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    env = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, *argv], stdin=subprocess.DEVNULL, stderr=slave, env=env
    )
    os.close(slave)
    screen = b""
    with suppress(OSError):  # the other end is closed
        while block := os.read(master, 1 << 16):
            screen += block
    os.close(master)
    return screen.decode(), process.wait(120)


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, number: int = signal.SIGINT) -> None:
    """A signal comes in the middle of the step that makes a token's number reach ``after``."""
    real_next = Stream.__next__
    token_count = 0

    def step_and_signal(self: Stream) -> Step:
        nonlocal token_count
        step = real_next(self)
        count_before = token_count
        token_count += len(step.token_ids)
        if count_before < after <= token_count:
            os.kill(os.getpid(), number)
        return step

    monkeypatch.setattr(Stream, "__next__", step_and_signal)
