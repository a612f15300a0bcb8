"""The runner: every row once, whatever is killed, and a crash costs one row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from benchmarks.runner import ROWS, Job, read_rows
from benchmarks.specs import Spec
from tests.benchmarks import crashing

DATA: dict[str, Any] = {"title": "A test", "variants": [{"name": "one"}, {"name": "two", "ngrams": 3}]}


class Watcher:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, job: Job, number: int, total: int, left: float | None) -> None:
        self.told.append((number, total, left is None))

    def progress(self, share: float) -> None:
        self.told.append(share)

    def end(self, job: Job, word: str, seconds: float) -> None:
        self.told.append(word)


def jobs(texts: int) -> list[Job]:
    spec = Spec("mine", DATA)
    return [Job("mine", "decode", "smoke", config) for config in spec.rows("smoke", {"texts": texts})]


def test_a_crash_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies, one that cannot measure and one that fails; all others have their rows."""
    monkeypatch.setattr(runner, "child", crashing.child)
    watcher = Watcher()
    done = runner.run(jobs(5), tmp_path, watcher)
    assert (done.done, done.before) == (4, 0)
    assert [why for _, why in done.unfit] == ["no such thing"] * 2
    assert [why for _, why in done.failed] == ["its process ended with code 9", "ValueError: bad"] * 2
    rows = read_rows(tmp_path)
    assert len({row["made"] for row in rows}) == 4  # a process each
    assert [(row["config"]["variant"], row["config"]["text"]) for row in rows] == [
        ("one", 0), ("one", 4), ("two", 0), ("two", 4)
    ]  # fmt: skip
    assert watcher.told[:3] == [(1, 10, True), 0.5, "done"] and (2, 10, False) in watcher.told

    again = runner.run(jobs(5), tmp_path, Watcher())
    assert (again.done, again.before) == (0, 4) and len(again.failed) == 4
    assert len((tmp_path / ROWS).read_text().splitlines()) == 4


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "child", crashing.child)
    runner.run(jobs(1), tmp_path, Watcher())
    file = tmp_path / ROWS
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert len(read_rows(tmp_path)) == 1
    done = runner.run(jobs(1), tmp_path, Watcher())
    assert (done.done, done.before) == (1, 1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["key"] for line in lines] == [job.key for job in jobs(1)]
