"""Tables by columns: which rows count, medians by hand, and what stands below a table once."""

from __future__ import annotations

from typing import Any

from benchmarks import tables
from benchmarks.specs import Spec
from tests.benchmarks.test_report import row


def spec(**table: Any) -> Spec:
    given = {
        "by": ["variant"],
        "columns": [["a", "{variant}"], ["×", "{speedup:.1f} {least:.1f}–{most:.1f}"]],
    }
    return Spec("mine", {"title": "A test", "group": "ours", "table": {**given, **table}})


def test_medians_over_seeds_and_the_newest_measurement() -> None:
    """Three seeds of the newest commit; an older commit's row does not count."""
    old = row("a", speedup=9.0, commit="old", date="2026-01-01")
    new = [row("a", seed=i, speedup=s, date="2026-01-02") for i, s in enumerate((1.0, 4.0, 2.0))]
    made = tables.table(spec(), [*new, old, row("b", commit="old")])
    assert made.head == ["a", "×"] and made.body == [
        ["a", "4.0 2.0–8.0"],
        ["b", "2.0 2.0–2.0"],
    ]  # at 200 tokens
