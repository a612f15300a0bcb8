"""The runner: every row once, whatever is killed, and a crash costs one row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import runner
from benchmarks.runner import ROWS, Job, read_rows
from benchmarks.specs import Spec
from tests.benchmarks import crashing

DATA = {
    "title": "A test",
    "variants": [{"name": "one"}, {"name": "two", "ngrams": 3}],
}


def jobs(texts: int) -> list[Job]:
    spec = Spec("mine", DATA)
    return [
        Job("mine", "decode", "smoke", config) for config in spec.rows("smoke", {"texts": texts})
    ]


def test_a_crash_costs_one_row(
    rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that dies, one that cannot measure and one that fails; all others have their
    rows."""
    monkeypatch.setattr(runner, "measure", crashing.measure)
    done = runner.run(jobs(5), tmp_path)
    assert done == {"there": 0, "done": 4, "left out": 2, "failed": 4}
    rows_there = read_rows(tmp_path)
    assert len({row["process"] for row in rows_there}) == 4  # one each
    assert [(row["config"]["variant"], row["config"]["text"]) for row in rows_there] == [
        ("one", 0),
        ("one", 4),
        ("two", 0),
        ("two", 4),
    ]
    lines = capsys.readouterr().err.splitlines()
    assert lines[2].startswith("[3/10] mine: one, text 3, seed 0: left out: no such thing, ")
    assert "failed: its process ended" in lines[1]
    assert "failed: ValueError: bad" in lines[3]

    again = runner.run(jobs(5), tmp_path)
    assert again == {"there": 4, "done": 0, "left out": 2, "failed": 4}
    assert len((tmp_path / ROWS).read_text().splitlines()) == 4


def test_a_line_that_was_cut_off_is_measured_again(
    rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "measure", crashing.measure)
    runner.run(jobs(1), tmp_path)
    file = tmp_path / ROWS
    file.write_bytes(file.read_bytes()[:-20])
    assert len(read_rows(tmp_path)) == 1
    done = runner.run(jobs(1), tmp_path)
    assert done["done"] == 1
    assert done["there"] == 1
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["key"] for line in lines] == [job.key for job in jobs(1)]
