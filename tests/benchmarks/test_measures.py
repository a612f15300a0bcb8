"""Every kind of measurement once, with the smallest sizes: its row fills its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import schemas, specs, tables
from benchmarks.common import Trial
from benchmarks.runner import read_rows
from tests.cli.conftest import Call, chatty_model
from tokenswift import LLM
from tokenswift.spec.adaptive.cost import Table
from tokenswift.spec.methods.resources import Resources

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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calibration", "strategies", "rivals", "json"])
def test_measured_on_the_default_model(bench: Call, name: str) -> None:
    done = bench("run", name)
    out = [line for line in done.err.splitlines() if ": left out: " in line]
    assert done.code == 0 and not out
    made = tables.table(specs.load(name), read_rows(Path("bench-results")))
    lines = [line for line in made.body if line[1] != tables.UNMEASURED]
    assert len(made.body) - len(lines) == len(out)
    filled = [cell != tables.MISSING for cell in sum(lines, [])]
    # A few drafts may leave deciles empty; every other table is full.
    assert lines and (all(filled) or (name == "calibration" and sum(filled) > len(filled) / 2))


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
