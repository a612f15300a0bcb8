"""Runs the command on many models, each in a child of one process that has everything loaded.

A child is ended after :data:`SECONDS` of processor time, and cannot map more than :data:`ROOM`
bytes besides what was mapped before; what it wrote to standard error says whether it ended as it
should.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.forks import start_forkserver
from tokenswift.cli import main as command
from tokenswift.types import InputError

SECONDS = 10
HANGS = 60
PROMPT = "a" * 60 + "!"  # what patterns that try everything try long
ROOM = 4 << 30  # of address space, and what is really used
MOST = 1 << 30
FORKS = multiprocessing.get_context("forkserver")


def generate(model: Path) -> int:
    """The command with a model."""
    return command.main(
        ["generate", PROMPT, "--model", str(model), "--max-new-tokens", "2", "--quiet"]
    )


def planted(name: str) -> int:
    """Ends that a run must not have, and the one that it should have."""

    def run(_: object) -> int:
        if name == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "trip":
            raise ZeroDivisionError
        raise InputError("this file is wrong")

    command.parsed = run  # type: ignore[assignment]  # in a process of its own
    return command.main(["generate"])


def fault(call: Callable[..., int], argument: object, folder: Path) -> str | None:
    """What is wrong with the end of a call; None where it is as it must be.

    Args:
        folder: for what it writes, and the command's cache.
    """
    start_forkserver()
    child = FORKS.Process(target=_child, args=(call, argument, folder))
    child.start()
    child.join(HANGS)
    if (code := child.exitcode) is None:
        child.kill()
        return "it hangs"
    lines = (folder / "stderr").read_text(errors="replace").splitlines()
    if code == 0 and not lines:
        return None
    line = lines[-1] if lines else ""
    failed = 1 if "hold NaN" in line else 2  # weights are finite or not as a pass finds them
    if code == failed and len(lines) == 1 and line.startswith("error: ") and len(line) <= 1000:
        return None
    return f"exit code {code}: {lines[-3:]}"


def _child(call: Callable[..., int], argument: object, folder: Path) -> None:
    file = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(file, 2)
    with open("/proc/self/statm") as pages:
        mapped, resident = (int(one) * resource.getpagesize() for one in pages.read().split()[:2])
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENSWIFT_CACHE"] = str(folder / "cache")
    code = call(argument)
    if (used := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident) > MOST:
        print(f"took {used:,} bytes", file=sys.stderr)
    sys.exit(code)
