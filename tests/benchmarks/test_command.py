"""``python -m benchmarks``: what it lists, what it refuses before anything runs, and a whole round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call

RUN = ("run", "table5")


@pytest.mark.parametrize(
    "words, line",
    [
        (("runn",), "unknown command runn; valid: list, run, report; did you mean run?"),
        (("run", "table9"), "spec is 'table9'; valid: table1, table2"),
        ((*RUN, "--preset", "huge"), "--preset is 'huge'; valid: smoke, cpu, gpu"),
        ((*RUN, "--set", "strategy=fast"), "strategy is 'fast'; valid: auto, autoregressive, tokenswift"),
        ((*RUN, "--set", "nonsense=1"), "--set: 'nonsense' is not a setting; valid: model"),
        ((*RUN, "--variant", "Medusa"), "--variant is 'Medusa'; valid: ours, fixed tree"),
        (("report",), "--results is 'bench-results': no such folder"),
    ],
)
def test_one_line_before_anything_runs(bench: Call, words: tuple[str, ...], line: str) -> None:
    done = bench(*words)
    assert done.code == 2 and done.error.startswith(line), done.err
    assert done.out == "" and done.files == []


def test_measured_and_reported(bench: Call, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A table of a tiny model, its report, and nothing measured twice."""
    words = (
        *RUN,
        "--model",
        tiny_folder(),
        "--set",
        "prefill=40",
        "--set",
        "points=24",
        "--set",
        "budget=32",
    )
    there = bench(*words, "--dry-run")
    assert (
        there.code == 0
        and there.out.count("to do  table5: ours, fixed tree, cache") == 3
        and there.files == []
    )
    done = bench(*words)
    assert done.code == 0 and "3 rows measured, 0 were there: bench-results" in done.err, done.err
    assert "[1/3] table5: ours, fixed tree, cache full, text 1, seed 0: done" in done.err
    assert "0 rows measured, 3 were there" in bench(*words).err
    assert bench(*words, "--dry-run").out.count("there  table5") == 3
    made = bench("report", "--title", "Tiny")
    assert made.out.split() == ["bench-results/report.md", "bench-results/report.html"]
    assert {"table5-smoke.svg", "table5-smoke.png", "report.md", "report.html"} <= set(made.files)
    text = (Path.cwd() / "bench-results" / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Tiny\n") and text.count("| 24 |") == 3 and text.count("| yes |") == 3
