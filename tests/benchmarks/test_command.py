"""``python -m benchmarks``: what it lists, what it refuses before anything runs, and all from
measuring to the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import specs, tables
from benchmarks.runner import read_rows
from tests.cli.conftest import Call

RUN = ("run", "table5")


@pytest.mark.parametrize(
    "words, line",
    [
        (("runn",), "argument command: invalid choice: 'runn'"),
        (("run", "table9"), "spec is 'table9'; valid: table1, table2"),
        ((*RUN, "--preset", "huge"), "preset is 'huge'; valid: smoke, cpu, real, gpu"),
        (
            (*RUN, "--set", "strategy=fast"),
            "strategy is 'fast'; valid: auto, autoregressive, tokenswift",
        ),
        ((*RUN, "--set", "nonsense=1"), "set: 'nonsense' is not a setting; valid: model"),
        ((*RUN, "--variant", "Medusa"), "variant is 'Medusa'; valid: ours, fixed tree"),
        (("report",), "results is 'bench-results': no such folder"),
    ],
)
def test_one_line_before_anything_runs(bench: Call, words: tuple[str, ...], line: str) -> None:
    done = bench(*words)
    assert done.code == 2
    assert done.error.startswith(line)
    assert done.out == ""
    assert done.files == []


def test_measured_and_reported(bench: Call, tiny_folder: Callable[..., Path]) -> None:
    """A table of a tiny model, its report, and nothing measured twice."""
    sizes = ("--set", "prefill=40", "--set", "points=24", "--set", "budget=32")
    words = (*RUN, "--model", tiny_folder(), *sizes)
    plan = bench(*words, "--dry-run")
    assert plan.code == 0
    assert plan.files == []
    assert plan.out.count("to do  table5: ours, fixed tree, cache") == 3
    done = bench(*words)
    assert done.code == 0, done.err
    assert "rows in bench-results: 0 there, 3 done" in done.err
    assert "[1/3] table5: ours, fixed tree, cache full, text 1, seed 0: done" in done.err
    assert "3 there, 0 done" in bench(*words).err
    assert bench(*words, "--dry-run").out.count("there  table5") == 3
    reported = bench("report", "--title", "Tiny")
    assert reported.out.split() == ["bench-results/report.md"], reported.err
    assert {"table5-smoke.svg", "report.md"} <= set(reported.files)
    text = (Path.cwd() / "bench-results" / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Tiny\n")
    assert text.count("| 24 |") == 3
    assert text.count("| yes |") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["passes", "texts", "table2", "floats"])
def test_a_kind_of_measurement_fills_its_table(
    bench: Call, tiny_folder: Callable[..., Path], name: str
) -> None:
    points = 400 if name == "texts" else 8  # the first of sixteen texts outlives their beginning
    sizes = ("--set", "prefill=60", "--set", f"points={points}", "--prompts", "random")
    model = tiny_folder(max_position_embeddings=512)
    done = bench("run", name, "--model", model, *sizes)
    assert done.code == 0, done.err
    assert "0 left out" in done.err, done.err
    spec = specs.load(name)
    (group,) = tables.groups(spec, read_rows(Path("bench-results")))
    table = tables.of_group(spec, group)
    assert table.body
    assert tables.MISSING not in [cell for line in table.body for cell in line]
