"""The rows of bench/results, and Markdown tables made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def rows_of(bench: str, keys: tuple[str, ...]) -> list[Row]:
    """The newest row for each set of conditions, in the order in which the sets first appear."""
    newest: dict[str, Row] = {}
    for found in every_row(bench):
        newest[json.dumps([found.get(key) for key in keys])] = found
    return list(newest.values())


def every_row(bench: str) -> list[Row]:
    """All rows of a benchmark, file by file in the order in which they were written."""
    lines = [
        line
        for file in sorted(RESULTS.glob("**/*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return [found for found in map(json.loads, lines) if found.get("bench") == bench]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def source(row: Row) -> str:
    """Where a row comes from."""
    return f"{row['machine']}, {row['dtype']}, commit {row['commit']}"
