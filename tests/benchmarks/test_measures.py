"""Every kind of measurement once, with the smallest sizes: its row fills its table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import schemas, specs, tables
from benchmarks.common import Trial
from benchmarks.runner import read_rows
from benchmarks.speeds import busy_loops
from tests.cli.conftest import Call, chatty_model
from tokenswift import LLM
from tokenswift.spec.adaptive.cost import Table
from tokenswift.spec.methods.resources import Resources

MEASURES = [
    *("passes", "bookkeeping", "ngram"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("decoding", "peers", "prefill", "memory")),
]
SMALL = ("--set", "prefill=60", "--set", "contexts=60,120", "--set", "points=8")


@pytest.mark.parametrize("name", MEASURES)
def test_measured_on_a_tiny_model(bench: Call, tiny_folder: Callable[..., Path], name: str) -> None:
    small = SMALL[:-2] if name == "ngram" else SMALL
    model = () if name == "ngram" else ("--model", tiny_folder())
    done = bench("run", name, *model, *small)
    assert done.code == 0 and "left out" not in done.err, done.err
    rows = read_rows(Path("bench-results"))
    assert rows and all(row["figures"] and row["commit"] != "" for row in rows)
    made = tables.table(specs.load(name), rows)
    filled = [cell for line in made.body for cell in line if cell != tables.MISSING]
    assert len(made.body) >= 1 and len(filled) >= 3, made


def test_json_by_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides after a small schema, the collection taking seconds to read; what is timed of masks is
    called, and its figures are those of the table."""
    ready: dict[str, Any] = {"properties": {"ready": {"type": "boolean"}}, "required": ["ready"]}
    one = {"type": "object", **ready, "additionalProperties": False}
    table = Table((1, 32), (1.0, 1.001), (0.0, 0.0))  # costs that need not be measured
    monkeypatch.setattr(Resources, "costs", lambda self, low=None: table)
    monkeypatch.setattr(schemas, "schemas", lambda llm, count: [("", one)] * count)
    spec = specs.load("json")
    (config,) = spec.rows("smoke", {"schemas": 2})
    with LLM(chatty_model(tmp_path / "chatty", 1024)) as llm:
        row = schemas.measure(Trial(llm, config))
    figures = row["figures"]["24"]
    assert row["identical"] and figures["schemas"] == figures["ended"] == figures["valid"] == 2
    assert figures["forced"] > 0.6 and 0 < figures["mask_share"] < 1 < figures["tokens_a_step"]
    columns = " ".join(cell for _, cell in spec.data["table"]["columns"])
    assert all(name in columns for name in figures)


def test_load_beside_busy_loops(bench: Call, tiny_folder: Callable[..., Path]) -> None:
    """The smoke sizes, and no loop that stays behind."""
    done = bench("run", "load", "--model", tiny_folder(), "--threads", "2")
    assert done.code == 0 and "left out" not in done.err, done.err
    (row,) = read_rows(Path("bench-results"))
    assert row["cores"] >= 1 and row["figures"]["8"].keys() == {
        f"{name}_{figure}" for name in ("idle", "one", "all") for figure in ("ms", "ratio")
    }
    assert tables.MISSING not in tables.table(specs.load("load"), [row]).body[0]
    alone = bench("run", "load", "--model", tiny_folder(), "--threads", "1")
    assert "left out: threads is 1; valid for load: at least 2" in alone.err


def test_busy_loops_end_with_whoever_began_them() -> None:
    """At the end of the block, and when the process is killed in the middle of it."""
    with busy_loops(2, min(os.sched_getaffinity(0))) as loops:
        assert all(loop.poll() is None for loop in loops)
    assert all(loop.poll() is not None for loop in loops)
    code = (
        "import os, time; from benchmarks.speeds import busy_loops\n"
        "with busy_loops(2) as loops:\n"
        "    print(*(loop.pid for loop in loops), flush=True); time.sleep(60)"
    )
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    end = time.monotonic() + 20
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    """Whether a process computes (one that has ended may still be listed, until somebody asks for it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nodes", "calibration", "strategies", "rivals", "json"])
def test_measured_on_the_default_model(bench: Call, name: str) -> None:
    done = bench("run", name)
    assert done.code == 0 and "left out" not in done.err, done.err
    made = tables.table(specs.load(name), read_rows(Path("bench-results")))
    filled = [cell != tables.MISSING for cell in sum(made.body, [])]
    # A few drafts may leave deciles empty; every other table is full.
    assert made.body and (all(filled) or (name == "calibration" and sum(filled) > len(filled) / 2))


@pytest.mark.slow
def test_a_row_names_the_heads_that_it_used(bench: Call) -> None:
    """Medusa's rows Medusa's heads, MagicDec's none, and all the weights of the model."""
    done = bench(
        "run",
        "strategies",
        "--variant",
        "Medusa",
        "--variant",
        "MagicDec, SnapKV",
        "--variant",
        "TokenSwift",
    )
    assert done.code == 0, done.err
    rows = {row["config"]["variant"]: row for row in read_rows(Path("bench-results"))}
    kinds = {variant: row["heads"] and row["heads"]["kind"] for variant, row in rows.items()}
    assert kinds == {"Medusa": "medusa", "MagicDec, SnapKV": None, "TokenSwift": "conditioned"}
    assert all(len(row["weights"]) >= 16 for row in rows.values())
    assert rows["Medusa"]["heads"]["weights"] != rows["TokenSwift"]["heads"]["weights"]
