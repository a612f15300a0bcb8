"""The runner: rows that are not there yet, one after the other, a process each; every row a line of JSON.

A row is written whole, by one write, once it is measured, and is known by its key (`settings.key_of`): rows
that are there are not run again. A line that was cut off by a kill is dropped when the next runner begins.
One runner at a time works on a folder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from benchmarks.settings import key_of, public
from tokenswift.types import InputError

ROWS = "rows.jsonl"
LOCK = "rows.lock"


@dataclass(frozen=True, slots=True)
class Job:
    """A row to measure.

    Attributes:
        spec, kind, preset: whose row it is.
        label: what tells it from the spec's other rows, in words.
        config: see `settings.resolve`.
    """

    spec: str
    kind: str
    preset: str
    config: dict[str, Any]
    label: str = ""

    @property
    def key(self) -> str:
        """What names its row."""
        return key_of(self.spec, self.config)

    def __str__(self) -> str:
        config = self.config
        label = self.label or config["variant"]
        return f"{self.spec}: {label}, text {config['text'] + 1}, seed {config['seed']}"


@dataclass(slots=True)
class Outcome:
    """What a runner did.

    Attributes:
        done, before: rows measured now, and rows that were there already.
        unfit, failed: rows left out and rows that failed, with a line each.
    """

    done: int = 0
    before: int = 0
    unfit: list[tuple[Job, str]] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)


class Watcher(Protocol):
    """Who is told how it goes: a row begins (with the seconds until all is done, by what rows took so far),
    so much of it is done, and it has ended: "done", or why not."""

    def begin(self, job: Job, number: int, total: int, left: float | None) -> None: ...

    def progress(self, share: float) -> None: ...

    def end(self, job: Job, word: str, seconds: float) -> None: ...


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all JSON-lines files of a folder (and below), a later one of equal key over an earlier."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.rglob("*.jsonl")):
        lines = file.read_bytes().split(b"\n")[:-1]  # what stands behind the last was cut off by a kill
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                found[row["key"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{file.name}, line {number} is not a row of a benchmark") from error
    return list(found.values())


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The file of rows, ours alone; what a kill left of a line is cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"results is {str(folder)!r}: another runner works there") from None
        file = folder / ROWS
        file.touch()
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(file, whole)
        yield file


def run(jobs: Sequence[Job], folder: Path, watcher: Watcher) -> Outcome:
    """Measure the jobs whose rows are not in ``folder``.

    Raises:
        InputError: another runner works there, or a file there holds other lines.
    """
    outcome = Outcome()
    with _locked(folder) as file:
        there = {row["key"] for row in read_rows(folder)}
        left: list[Job] = []
        for job in jobs:
            if job.key in there:
                outcome.before += 1
            else:
                there.add(job.key)
                left.append(job)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.row"])  # processes are forked from what imported it once
        begun = time.monotonic()
        for number, job in enumerate(left, 1):
            started = time.monotonic()
            each = (started - begun) / (number - 1) if number > 1 else None
            watcher.begin(job, number, len(left), each and each * (len(left) - number + 1))
            word, made = _measure(context, job, watcher)
            seconds = time.monotonic() - started
            if word == "row":
                row = {"key": job.key, "spec": job.spec, "kind": job.kind, "preset": job.preset}
                row |= {"config": public(job.config), "seconds": round(seconds, 2), **made}
                line = json.dumps(row, ensure_ascii=False) + "\n"
                with file.open("ab", buffering=0) as out:
                    out.write(line.encode())
                    os.fsync(out.fileno())
                outcome.done += 1
            else:
                (outcome.unfit if word == "unfit" else outcome.failed).append((job, made))
            words = {"row": "done", "unfit": f"left out: {made}"}
            watcher.end(job, words.get(word, f"failed: {made}"), seconds)
    return outcome


def _measure(context: Any, job: Job, watcher: Watcher) -> tuple[str, Any]:
    """One row in a process of its own: ("row", what it says), ("unfit", why) or ("failed", why)."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(job.kind, job.config, sender), daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            wait([receiver, process.sentinel])
            try:
                message: Any = receiver.recv() if receiver.poll() else None
            except EOFError:
                message = None
            if message is None:
                process.join()
                return "failed", f"its process ended with code {process.exitcode}"
            if message[0] != "progress":
                process.join()
                return message
            watcher.progress(message[1])
    finally:
        if process.is_alive():
            process.terminate()
            process.join()
        receiver.close()


def child(kind: str, config: dict[str, Any], out: Connection) -> None:
    """Measure; send ``("progress", share)`` …, then ``("row", …)``, ``("unfit", line)`` or
    ``("failed", line)``. The process ends with the one that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    # What a run is told a row says: its heads, its rule.
    logging.getLogger("tokenswift").setLevel(logging.ERROR)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        from benchmarks.row import measure

        out.send(("row", measure(kind, config, lambda share: out.send(("progress", share)))))
    except InputError as error:
        out.send(("unfit", str(error)))
    except Exception as error:  # the runner goes on with the next row, and the user sees one line
        out.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
