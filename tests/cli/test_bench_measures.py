"""Every kind of measurement once, with the smallest sizes: its row fills its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.benchmark import columns, specs
from tokenswift.benchmark.runner import read_rows

SMALL = ("--set", "prefill=60", "--set", "contexts=60,120", "--set", "points=8")


@pytest.mark.parametrize("name", ["decoding", "peers", "prefill", "passes", "memory", "bookkeeping", "ngram"])
def test_measured_on_a_tiny_model(cli: Call, tiny_folder: Callable[..., Path], name: str) -> None:
    small = SMALL[:-2] if name == "ngram" else SMALL
    model = () if name == "ngram" else ("--model", tiny_folder())
    done = cli("bench", "run", name, *model, *small)
    assert done.code == 0 and "left out" not in done.err, done.err
    rows = read_rows(Path("bench-results"))
    assert rows and all(row["figures"] and row["commit"] != "" for row in rows)
    made = columns.table(specs.load(name), rows)
    filled = [cell for line in made.body for cell in line if cell != columns.MISSING]
    assert len(made.body) >= 1 and len(filled) >= 3, made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nodes", "calibration", "training-memory", "strategies", "rivals"])
def test_measured_on_the_default_model(cli: Call, name: str) -> None:
    done = cli("bench", "run", name)
    assert done.code == 0 and "left out" not in done.err, done.err
    made = columns.table(specs.load(name), read_rows(Path("bench-results")))
    assert made.body and columns.MISSING not in sum(made.body, [])


@pytest.mark.slow
def test_a_row_names_the_heads_that_it_used(cli: Call) -> None:
    """Medusa's rows Medusa's heads, MagicDec's none, and all the weights of the model."""
    done = cli(
        "bench",
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
