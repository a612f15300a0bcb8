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
from typing import Any

from filelock import FileLock, Timeout

from benchmarks.settings import key_of, public
from tokenswift.types import InputError

ROWS, LOCK = "rows.jsonl", "rows.lock"


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
    config: dict[str, Any]
    label: str = ""

    @property
    def key(self) -> str:
        """What names its row."""
        return key_of(self.spec, self.config)

    def __str__(self) -> str:
        label = self.label or self.config["variant"]
        return f"{self.spec}: {label}, text {self.config['text'] + 1}, seed {self.config['seed']}"


def read_rows(*folders: Path) -> list[dict[str, Any]]:
    """The rows of all JSON-lines files of folders (and below), a later one of equal key over an
    earlier."""
    found: dict[str, dict[str, Any]] = {}
    for file in [file for folder in folders for file in sorted(folder.rglob("*.jsonl"))]:
        lines = file.read_bytes().split(b"\n")[
            :-1
        ]  # what stands behind the last was cut off by a kill
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                found[row["key"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{file.name}, line {number} is not a row of a benchmark"
                ) from error
    return list(found.values())


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
            started = time.monotonic()
            word, made = _measured(job)
            seconds = time.monotonic() - started
            counts[word] += 1
            if word == "done":
                row = {"key": job.key, "spec": job.spec, "kind": job.kind, "preset": job.preset}
                row |= {"config": public(job.config), "seconds": round(seconds, 2), **made}
                with file.open("ab", buffering=0) as out:
                    out.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                    os.fsync(out.fileno())
            said = word if word == "done" else f"{word}: {made}"
            print(
                f"[{number}/{len(left)}] {job}: {said}, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    return counts


def _measured(job: Job) -> tuple[str, Any]:
    """One row in a process of its own: ("done", what it says), ("left out", why) or ("failed",
    why)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.row"]
    )  # processes are forked from what imported it once
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return "done", pool.submit(measure, job.kind, job.config).result()
        except InputError as error:
            return "left out", str(error)
        except BrokenProcessPool:
            return "failed", "its process ended"
        except (
            Exception
        ) as error:  # the runner goes on with the next row, and the user sees one line
            return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def measure(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """What a row says; torch is loaded in its process alone."""
    from benchmarks import row

    return row.measure(kind, config)
