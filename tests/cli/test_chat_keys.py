"""A chat in a real terminal: what is typed during an answer is kept and run."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import chatty_model

#: ``tokenswift`` whose first answer waits at its third step until the file "go" is there, and whose answers
#: are the pieces of the file "say" where there is one
DRIVER = """
import sys, time
from dataclasses import replace
from pathlib import Path
from tokenswift.engine.llm import LLM
from tokenswift.engine.run import Run
from tokenswift.engine.stream import Stream

class Waits(Stream):
    steps = 0
    def __next__(self):
        step = super().__next__()
        self.steps += 1
        if self.steps == 3 and not Path("go").exists():
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.02)
            time.sleep(0.2)  # for the terminal's own queue
        step = replace(step, text=step.text or ".")  # bytes that are not character yet would be no answer
        if Path("say").exists():
            pieces = Path("say").read_text().split("|")
            step = replace(step, text=pieces[self.steps - 1] if self.steps <= len(pieces) else "")
        return step

LLM.start = lambda self, request, *more: Waits(Run(self, replace(request, ignore_eos=True), *more))
from tokenswift.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_model(tmp_path_factory.mktemp("chatty"), 8192)


class Session:
    """A chat on a terminal of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.screen = folder, b""
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 40))
        self.mode = termios.tcgetattr(slave)
        more = [
            "--model",
            str(model),
            "--max-new-tokens",
            "12",
            "--history",
            "none",
            "--device",
            "cpu",
            "--seed",
            "1",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, "chat", *more],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**os.environ, "TERM": "xterm"},
            preexec_fn=_own_terminal,
        )
        os.close(slave)

    def until(self, done: Any) -> None:
        """Read the screen until ``done()`` holds or the chat ends."""
        end = time.monotonic() + 100
        while not done():
            assert time.monotonic() < end, self.screen
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.screen += os.read(self.master, 1 << 16)
                except OSError:
                    return

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait(self) -> int:
        self.until(lambda: self.process.poll() is not None)
        return self.process.wait(10)

    def texts(self) -> str:
        """What was shown, without what moves the cursor or colours it."""
        shown = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self.screen)
        return shown.decode().replace("\r\n", "\n").replace("\r", "")

    def messages(self, name: str = "c.json") -> list[str]:
        return [m["content"] for m in json.loads((self.folder / name).read_text()) if m["role"] == "user"]


def _own_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C in it is a signal."""
    import fcntl

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def session(tmp_path: Path, chatty: Path) -> Iterator[Session]:
    made = Session(tmp_path, chatty)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGKILL)
    made.process.wait(10)
    os.close(made.master)


def begin(session: Session) -> None:
    """Ask something; returns in the middle of the answer."""
    session.until(lambda: b"/help lists" in session.screen)
    session.type(b"Hello\r")
    session.until((session.folder / "waits").exists)


def test_lines_typed_during_an_answer_are_kept_and_run(session: Session) -> None:
    begin(session)
    session.type("Größe?\r".encode() + b"wrong\x7f\x7f\x7f\x7f\x7fright\r" + b"/save c.json\r/exit\r")
    (session.folder / "go").touch()
    assert session.wait() == 0, session.screen
    assert session.messages() == ["Hello", "Größe?", "right"]


@pytest.mark.parametrize(
    "end", [None, *(pytest.param(keys, marks=pytest.mark.slow) for keys in (b"/exit\r", b"\x04"))]
)
def test_the_terminal_is_given_back_as_it_was(session: Session, end: bytes | None) -> None:
    session.until(lambda: b"/help lists" in session.screen)
    if end is None:
        session.process.send_signal(signal.SIGTERM)
    else:
        session.type(end)
    assert session.wait() == (143 if end is None else 0), session.screen
    assert termios.tcgetattr(session.master) == session.mode
