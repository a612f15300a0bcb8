"""Compilers as processes: several at once, with a limit of time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenswift.types import OnProgress

TIMEOUT = 600  # seconds for one compilation; the machine may be busy
MOST_COMPILERS = 8  # at once; each takes some 200 MB
LOOK = 0.02  # seconds until it is looked again whether a compiler has ended


def run_all(
    commands: Sequence[Sequence[str]],
    folder: Path,
    processors: int,
    on_progress: OnProgress | None = None,
) -> str | None:
    """Run commands in a folder, as many at once as there are processors.

    Args:
        processors: how many there are.
        on_progress: called with the stage "compile", commands that have ended, and all.
    Returns:
        The first line of an error of one that failed; None where all ended well.
    Raises:
        TimeoutExpired: they took too long. None of them runs any more then.
    """
    report = on_progress or (lambda *_: None)
    most = min(processors, MOST_COMPILERS)
    end = time.monotonic() + TIMEOUT
    waiting = list(enumerate(commands))
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            report("compile", len(commands) - len(waiting) - len(running), len(commands))
            while waiting and len(running) < most:
                number, command = waiting.pop(0)
                running[number] = _start(command, folder / f"{number}.log")
            number = _next_end(running, end)
            if running.pop(number).returncode:
                return _error_in(folder / f"{number}.log")
        report("compile", len(commands), len(commands))
        return None
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a log's folder; what it says of errors goes to the log."""
    with log.open("wb") as errors:
        return subprocess.Popen(
            command,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def _next_end(running: Mapping[int, subprocess.Popen[bytes]], end: float) -> int:
    """Wait until one of several processes has ended; returns its number.

    Args:
        end: when that is too long, by the monotonic clock.
    Raises:
        TimeoutExpired: it is.
    """
    while True:
        for number, process in running.items():
            if process.poll() is not None:
                return number
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired("the C compiler", TIMEOUT)
        time.sleep(LOOK)


def _error_in(log: Path) -> str:
    """The line of a compiler's log that says what is wrong; "" where it says nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if "error" in line]
    return "".join((errors or lines)[:1])[:200]
