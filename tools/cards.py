"""Tables of the docs that a CUDA card has measured: passes by their rows, and a real model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.json_lines import rows_of
from benchmarks.tables import Table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PASSES = RESULTS / "card-h200.jsonl"  # of benchmarks.card
REAL = RESULTS / "real-h200.jsonl"  # of benchmarks.real


def passes() -> Table:
    """Passes of an 8B model of random weights, by rows and length of the context."""
    rows = rows_of(PASSES)
    measured = [row for row in rows if row["what"] == "pass"]
    if not measured:
        return Table([], [], "Not measured yet: `python -m benchmarks.card --results FOLDER`.")
    counts = sorted({row["rows"] for row in measured})
    body: list[list[str]] = []
    for context in sorted({row["context"] for row in measured}):
        of_rows = {row["rows"]: row for row in measured if row["context"] == context}
        cells = [
            f"{of_rows[count]['ms']:.1f} ({of_rows[count]['over_one_row']:.2f})" for count in counts
        ]
        body.append([f"{context:,}", *cells])
    about = next(row for row in rows if row["what"] == "versions")
    below = (
        "A Llama of 8B with random weights in bfloat16 on an NVIDIA H200, LM head included: ms, "
        "and in brackets over a pass of one row; "
        f"torch {about['torch']}, Triton {about['triton']}, commit {about['commit'][:8]}."
    )
    return Table(["context, tokens", *(f"{count} rows" for count in counts)], body, below)


def real() -> Table:
    """A real model's tasks, plainly and with drafts."""
    rows = [row for row in rows_of(REAL) if "task" in row]
    if not rows:
        return Table([], [], "Not measured yet: `python -m benchmarks.real MODEL` on a card.")
    body = [
        [
            row["task"],
            f"{row['tokens']}",
            f"{row['plain']:.0f}",
            f"{row['auto']:.0f}",
            f"**{row['auto_over_plain']:.2f}**",
            f"{row['tokens_a_step']:.2f}",
            "yes" if row["identical"] else "**no**",
        ]
        for row in rows
    ]
    first = rows[0]
    below = (
        f"{first['model']} ({first['dtype']}) on an {first['machine']}, one text each, in the "
        f"order in which they were measured; commit {first['commit']}."
    )
    head = ["task", "new tokens", "plain, tokens/s", "with drafts, tokens/s", "÷ plain"]
    return Table([*head, "tokens a step", "identical"], body, below)
