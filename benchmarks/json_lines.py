"""Lines of JSON: a benchmark's rows, and what it asks of other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from benchmarks.words import Row
from tokenswift.types import RunError

PEERS = Path(__file__).with_name("peers")
Answer = TypeVar("Answer")


def rows_of(file: Path) -> list[Row]:
    """The rows of a file of JSON lines; [] where there is none."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def peak_bytes(pid: int) -> int:
    """Bytes of memory that a process held at most so far; 0 where the system does not say, or the
    process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class LineProcess:
    """A process that answers each line of JSON on its input with one on its output.

    Use it in a ``with`` block, which ends the process.

    Args:
        name: what it is, for messages.
        command: the program and its arguments.
        folder: its working folder, where it is not this process's.
        environment: variables that differ from this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            cwd=folder,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, question: object, answer_type: type[Answer]) -> Answer:
        """What it answers to a line.

        Raises:
            RunError: the process has ended, or answers something else.
        """
        pipe = self._process.stdin
        if pipe is None:
            raise RunError(f"{self._name} has no input")
        try:
            pipe.write(json.dumps(question) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self.read(answer_type)

    def read(self, answer_type: type[Answer]) -> Answer:
        """The next line that it writes.

        Raises:
            RunError: the process has ended, or writes something else.
        """
        output = self._process.stdout
        line = output.readline() if output is not None else ""
        if not line:
            raise self._ended()
        try:
            return msgspec.json.decode(line, type=answer_type)
        except msgspec.DecodeError as error:
            raise RunError(f"{self._name} answers {line.strip()[:80]!r}: {error}") from error

    def peak_bytes(self) -> int:
        """As :func:`peak_bytes`, of the process."""
        return peak_bytes(self._process.pid)

    def close(self) -> int:
        """End the process; its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what is left to write has no reader
                    pipe.close()
        return self._process.wait()

    def _ended(self) -> RunError:
        return RunError(f"{self._name} ended with code {self.close()}")


class LlamaProcess(LineProcess):
    """llama.cpp on a model's file, in a process of its own.

    Args:
        python: an interpreter that has llama_cpp.
        program: one of `benchmarks.peers`.
        file: the model.
        threads: of each pass.

    Attributes:
        version: of llama_cpp.
    """

    def __init__(self, python: str, program: str, file: Path, threads: int) -> None:
        command = [python, str(PEERS / program), str(file), str(threads)]
        super().__init__("llama.cpp's process", command)
        self.version = self.read(str)


def last_line_of(
    program: str,
    arguments: Sequence[object],
    answer_type: type[Answer],
    sources: Path,
    cache: Path | None = None,
) -> Answer:
    """The last line that one of `benchmarks.peers` writes, run with this interpreter.

    Args:
        sources: the folder that it imports tokenswift from.
        cache: where it keeps models and kernels; by default the user's cache.
    """
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    if cache is not None:
        environment |= {"TOKENSWIFT_CACHE": str(cache), "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, str(PEERS / program), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=answer_type)


def publish(row: Mapping[str, object], out: Path | None) -> None:
    """Print a row as a line of JSON; ``out`` gets the same line at its end."""
    line = json.dumps(row)
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
