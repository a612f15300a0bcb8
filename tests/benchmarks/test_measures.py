"""Every kind of measurement once, with the smallest sizes: its row fills its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import specs, tables
from benchmarks.runner import read_rows
from tests.cli.conftest import Call

MEASURES = [
    *("passes", "bookkeeping"),
    pytest.param("memory", marks=pytest.mark.slow),
]
SMALL = ("--set", "prefill=60", "--set", "contexts=60,120", "--set", "points=8")


@pytest.mark.parametrize("name", MEASURES)
def test_measured_on_a_tiny_model(bench: Call, tiny_folder: Callable[..., Path], name: str) -> None:
    done = bench("run", name, "--model", tiny_folder(), *SMALL)
    assert done.code == 0 and "left out" not in done.err, done.err
    rows = read_rows(Path("bench-results"))
    assert rows and all(row["figures"] and row["commit"] != "" for row in rows)
    made = tables.table(specs.load(name), rows)
    filled = [cell for line in made.body for cell in line if cell != tables.MISSING]
    assert len(made.body) >= 1 and len(filled) >= 3, made
