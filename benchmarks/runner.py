"""The runner: rows that are not there yet, one after the other, a process each; every row a line of
JSON.

A row is written whole, by one write, once it is measured, and is known by its key
(`settings.key_of`): rows that are there are not run again. A line that was cut off by a kill is
dropped when the next runner begins. One runner at a time works on a folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from benchmarks.settings import Config, key_of, public
from benchmarks.words import Measured, Row
from tokenswift.types import InputError

ROWS = "rows.jsonl"
LOCK = "rows.lock"


@dataclass(frozen=True, slots=True)
class Job:
    """A row to measure.

    Attributes:
        spec, kind, preset: whose row it is.
        config: see `settings.resolve`.
        label: what tells it from the spec's other rows, in words.
    """

    spec: str
    kind: str
    preset: str
    config: Config
    label: str = ""

    @property
    def key(self) -> str:
        """What names its row."""
        return key_of(self.spec, self.config)

    def __str__(self) -> str:
        label = self.label or self.config["variant"]
        return f"{self.spec}: {label}, text {self.config['text'] + 1}, seed {self.config['seed']}"


def read_rows(*folders: Path) -> list[Row]:
    """The rows of all JSON-lines files of folders (and below), a later one of equal key over an
    earlier."""
    rows: dict[str, Row] = {}
    files = [file for folder in folders for file in sorted(folder.rglob("*.jsonl"))]
    for file in files:
        *lines, _ = file.read_bytes().split(b"\n")  # what follows the last was cut off by a kill
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                rows[row["key"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{file.name}, line {number} is not a row of a benchmark"
                ) from error
    return list(rows.values())


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The file of rows, ours alone; what a kill left of a line is cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=0):
            file = folder / ROWS
            file.touch()
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
            yield file
    except Timeout:
        raise InputError(f"results is {str(folder)!r}: another runner works there") from None


def run(jobs: Sequence[Job], folder: Path) -> dict[str, int]:
    """Measure the jobs whose rows are not in ``folder``; standard error has a line for each.

    Returns:
        How many rows were "there", and how many are "done", "left out" and "failed".
    Raises:
        InputError: another runner works there, or a file there holds other lines.
    """
    counts: dict[str, int] = dict.fromkeys(("there", "done", "left out", "failed"), 0)
    with _locked(folder) as file:
        there = {row["key"] for row in read_rows(folder)}
        left = {job.key: job for job in jobs if job.key not in there}
        counts["there"] = len(jobs) - len(left)
        for number, job in enumerate(left.values(), 1):
            start = time.monotonic()
            outcome = _measured(job)
            seconds = time.monotonic() - start
            counts[outcome.word] += 1
            if outcome.row is not None:
                _append(file, job, seconds, outcome.row)
            print(
                f"[{number}/{len(left)}] {job}: {outcome}, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    return counts


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        word: "done", "left out" or "failed".
        row: what the row says beside its configuration, where it is done.
        reason: where it is not.
    """

    word: str
    row: Measured | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


def _append(file: Path, job: Job, seconds: float, measured: Measured) -> None:
    """Write a row to the end of a file, by one write, and to the disk."""
    row = {
        "key": job.key,
        "spec": job.spec,
        "kind": job.kind,
        "preset": job.preset,
        "config": public(job.config),
        "seconds": round(seconds, 2),
        **measured,
    }
    with file.open("ab", buffering=0) as out:
        out.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        os.fsync(out.fileno())


def _measured(job: Job) -> Outcome:
    """One row, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    # imported once, by the process that all others are forked from
    context.set_forkserver_preload(["benchmarks.row"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return Outcome("done", row=pool.submit(measure, job.kind, job.config).result())
        except InputError as error:
            return Outcome("left out", reason=str(error))
        except BrokenProcessPool:
            return Outcome("failed", reason="its process ended")
        except Exception as error:  # the next row is measured, and the user sees one line
            text = " ".join(str(error).split())[:200]
            return Outcome("failed", reason=f"{type(error).__name__}: {text}")


def measure(kind: str, config: Config) -> Measured:
    """What a row says; torch is loaded in its process alone."""
    from benchmarks import row

    return row.measure(kind, config)
