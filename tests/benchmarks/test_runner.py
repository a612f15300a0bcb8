"""The runner: every row once, whatever is killed, and a crash costs one row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner, specs
from benchmarks.runner import ROWS, Job, read_rows
from benchmarks.specs import Spec
from tests.benchmarks import crashing
from tokenswift.types import InputError

ROOT = Path(__file__).parents[2]
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


def test_two_runners_in_one_folder_and_other_files(tmp_path: Path) -> None:
    with runner._locked(tmp_path), pytest.raises(InputError, match="another runner works there"):
        runner.run(jobs(1), tmp_path, Watcher())
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match="other.jsonl, line 1 is not a row of a benchmark"):
        runner.run(jobs(1), tmp_path, Watcher())


SPEC = """title = "A test"
[settings]
prefill = 40
points = [8, 24]
budget = 32
sinks = 4
strategy = "tokenswift"
tree = "2,2"
draft = "partial"
texts = 2
[[variants]]
name = "fixed"
[[variants]]
name = "sparse"
strategy = "magicdec"
gamma = 2
[[variants]]
name = "published"
acceptance = "published"
"""


@pytest.mark.slow
def test_killed_and_started_again(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """SIGKILL after the first row and again after the next; in the end every row is there, once."""
    spec, results = tmp_path / "mine.toml", tmp_path / "results"
    spec.write_text(SPEC)
    command = [sys.executable, "-m", "benchmarks", "run", str(spec)]
    command += ["--model", str(tiny_folder()), "--results", str(results), "--quiet"]
    file = results / ROWS

    def count() -> int:
        return file.read_bytes().count(b"\n") if file.exists() else 0

    for wanted in (1, 2):
        running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 240
        while count() < wanted and running.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert running.poll() is None, running.stderr.read() if running.stderr else ""
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        assert running.stderr is not None
        running.stderr.close()
        assert wanted <= count() < 6
    first = file.read_bytes()
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert file.read_bytes().startswith(first[: first.rfind(b"\n") + 1])  # what was there stayed
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    given = {"model": str(tiny_folder())}
    expected = [Job("mine", "decode", "smoke", c).key for c in specs.load(str(spec)).rows("smoke", given)]
    assert sorted(row["key"] for row in rows) == sorted(expected) and len(set(expected)) == 6
    assert str(tmp_path) not in file.read_text()  # no places of this machine
    for row in rows:
        exact = row["config"]["variant"] != "published"
        assert row["lossless"] is exact and (row["identical"] or not exact)
        assert set(row["figures"]) == {"8", "24"} and row["figures"]["24"]["length"] >= 1
        assert (
            row["machine"] and row["versions"]["torch"] and row["date"] and row["reached"] == "by generating"
        )
        assert row["raw"]["plain"]["curve"][-1][0] == row["raw"]["variant"]["curve"][-1][0] == 24
    names = {row["config"]["text"]: row["prompt"]["digest"] for row in rows}
    assert len(set(names.values())) == 2  # two prompts


def test_lengths_reached_by_text(tiny_folder: Callable[..., Path]) -> None:
    """A row says how its length was reached."""
    from benchmarks.row import measure

    given = {"model": str(tiny_folder()), "prefill": 30, "points": [60, 90], "reach": "text", "measured": 10}
    _, second = Spec(
        "mine", {"title": "A test", "variants": [{"name": "plain", "strategy": "autoregressive"}]}
    ).rows("smoke", given)
    made = measure("decode", second)
    assert made["reached"] == "by prefilled text" and made["context"] == "110 tokens prefilled, 10 generated"
    assert list(made["figures"]) == ["90"] and made["prompt"]["tokens"] == 110
    assert made["raw"]["variant"]["curve"][-1][0] == 10


def test_a_row_names_the_heads_that_it_used(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Their file, and of their training tokens and steps; a strategy that uses none names none."""
    from benchmarks.row import measure
    from tests.lossless.test_tokens import random_heads
    from tokenswift.loader.load import load
    from tokenswift.spec.heads.checkpoint import base_of, save_heads

    model, file = (
        load(str(tiny_folder()), dtype="float32", device="cpu").model,
        tmp_path / "mine.heads.safetensors",
    )
    heads = random_heads("linear", model.config.hidden_size, model.config.vocab_size)
    save_heads(heads, file, base_of(model), notes={"tokens": 1234, "steps": 56.0, "minutes": 1.5})
    given = {"model": str(tiny_folder()), "heads": str(file), "prefill": 30, "points": [8], "tree": "1,2"}
    spec = Spec(
        "mine", {"title": "A test", "variants": [{"name": "a"}, {"name": "b", "strategy": "magicdec"}]}
    )
    ours, magicdec = (measure("decode", config) for config in spec.rows("smoke", given))
    assert ours["heads"].pop("weights")
    assert ours["heads"] == {"kind": "linear", "count": 3, "file": file.name, "tokens": 1234, "steps": 56}
    assert magicdec["heads"] is None and "draft_model" not in magicdec
    assert ours["stored"] == {"file": None, "types": ["float32"]}
    last = ours["figures"]["8"]
    assert last["price"] == pytest.approx(last["length"] / last["speedup"], rel=1e-3)
    assert last["step_ms"] == pytest.approx(last["ms"] * last["length"], rel=1e-3)
