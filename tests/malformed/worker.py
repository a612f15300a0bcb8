"""Runs the command on many models, each in a child of one process that has everything loaded.

``python -m tests.malformed.worker`` reads a line of JSON for each run, the command's arguments, and answers
with one: exit code, signal, seconds, memory above the process's own, and what was written to standard error.
A child is ended after :data:`SECONDS`, and cannot map more than :data:`ROOM` bytes besides. ``["planted",
NAME]`` is one of :func:`_planted`'s ends.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.malformed.cases import Case
from tokenswift.cli import main as command
from tokenswift.loader.find import cache_dir
from tokenswift.types import InputError

SECONDS = 30
PROMPT = "a" * 60 + "!"  # what patterns that try everything try long
ROOM = 4 << 30  # of address space; what is really used is measured
ROOT = Path(__file__).parents[2]


class Worker:
    """A process that runs the command, with a folder for the command's cache."""

    def __init__(self, cache: Path) -> None:
        kernels = cache_dir() / "kernels"
        if kernels.is_dir():
            (cache / "kernels").symlink_to(kernels)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.malformed.worker"],
            cwd=ROOT,
            env={**os.environ, "TOKENSWIFT_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def load(self, case: Case, folder: Path) -> dict[str, Any]:
        """What becomes of a command that generates with the model of a case; its files are gone then."""
        folder.mkdir()
        try:
            path = case.write(folder)
            return self.run(["generate", PROMPT, "--model", path, "--max-new-tokens", "2", "--quiet"])
        finally:
            shutil.rmtree(folder)

    def run(self, argv: Sequence[object]) -> dict[str, Any]:
        """What became of the command."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([str(word) for word in argv]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def fault(found: dict[str, Any]) -> str | None:
    """What is wrong with the end of a run; None where it is as it must be."""
    lines = found["stderr"].splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if found["seconds"] > 10:
        return f"took {found['seconds']:.1f} s"
    if found["bytes"] > 1 << 30:
        return f"took {found['bytes']:,} bytes"
    if found["signal"]:
        return f"signal {found['signal']}"
    if "Traceback" in found["stderr"] or "panicked" in found["stderr"]:
        return f"a traceback: {lines[-1]}"
    if found["code"] == 0 and not errors:
        return None
    failed = 1 if errors and "hold NaN" in errors[0] else 2  # weights are finite or not as a pass finds them
    if found["code"] != failed or len(errors) != 1 or lines[-1:] != errors:
        return f"exit code {found['code']}, {lines[-3:]}"
    if len(errors[0]) > 1000:
        return f"a line of {len(errors[0])} characters"
    if len(lines) > 1:
        return f"more than a line: {lines[:3]}"
    return None


def _planted(name: str) -> None:
    """Ends that a run must not have, and the one that it should have."""
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "trip":
        raise ZeroDivisionError
    raise InputError("this file is wrong")


def _child(argv: list[str], out: int, err: int, tell: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the questions are not a prompt
    os.dup2(out, 1)
    os.dup2(err, 2)
    with open("/proc/self/statm") as file:
        mapped, resident = (int(pages) * resource.getpagesize() for pages in file.read().split()[:2])
    os.write(tell, str(resident).encode())
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    try:
        if argv[0] == "planted":
            code = command.main(argv, lambda _: _planted(argv[1]))  # type: ignore[arg-type,return-value]
        else:
            code = command.main(argv)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(argv: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start, (told, tell) = time.monotonic(), os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(argv, out.fileno(), err.fileno(), tell)
        while True:
            done, status, used = os.wait4(pid, os.WNOHANG)
            seconds = time.monotonic() - start
            if done:
                break
            if seconds > SECONDS:
                os.kill(pid, signal.SIGKILL)
                _, status, used = os.wait4(pid, 0)
                break
            time.sleep(0.005)
        own = int(os.read(told, 32))
        os.close(told)
        os.close(tell)
        err.seek(0)
        said = err.read().decode(errors="replace")
    busy = used.ru_utime + used.ru_stime
    return {
        "code": os.waitstatus_to_exitcode(status),
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "seconds": min(seconds, busy) if seconds < SECONDS else seconds,
        "bytes": used.ru_maxrss * 1024 - own,
        "stderr": said,
    }


def main() -> None:
    """Answer until nobody asks."""
    import torch

    torch.set_num_threads(1)
    import transformers.modeling_utils  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
    from transformers import GenerationConfig, PreTrainedTokenizerFast  # noqa: F401

    import tokenswift.engine.llm
    import tokenswift.loader.load  # noqa: F401
    from tokenswift.models.target import backend_for

    command.build_parser()
    backend_for()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
