"""One HTML page about the runs of many prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenswift.runs.report.plots import number
from tokenswift.runs.report.render import render
from tokenswift.words import counted

HEAD = (
    "run",
    "state",
    "tokens",
    "of",
    "tokens a second",
    "tokens a pass",
    "sessions",
    "loop from",
    "written",
)


def page_of_all(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """The report of all runs in a folder.

    Args:
        rows: their figures, as `runs.listing.summary_of` gives them.
        name: of the folder, for the title.
    """
    known = [row for row in rows if "tokens" in row]
    finished = sum(row["finished"] for row in known)
    tokens, seconds = (sum(row[key] for row in known) for key in ("tokens", "seconds"))
    models = Counter(f"{row['model']} ({row['dtype']})" for row in known)
    figures = [
        ("finished", f"{finished:,} of {len(rows):,}"),
        ("new tokens", f"{tokens:,} of at most {sum(row['max_new_tokens'] for row in known):,}"),
        ("prompt tokens", f"{sum(row['prompt_tokens'] for row in known):,}"),
        ("tokens a second of a text's own time", number(tokens / seconds if seconds else None)),
        ("gone on with", counted(sum(row["sessions"] > 1 for row in known), "text")),
        ("sessions", f"{sum(row['sessions'] for row in known):,}"),
        ("repeat themselves", counted(sum(row["loop_start"] is not None for row in known), "text")),
        ("models", ", ".join(f"{model}: {count:,}" for model, count in models.most_common())),
    ]
    title = f"Runs in {name}: {finished:,} of {len(rows):,} finished, {counted(tokens, 'token')}"
    return render("runs.html", title=title, figures=figures, head=HEAD, runs=[_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = Path(row["run"]).name
    if "tokens" not in row:
        return name, row["state"], *[""] * (len(HEAD) - 2)
    loop = row["loop_start"]
    return (
        name,
        row["state"],
        f"{row['tokens']:,}",
        f"{row['max_new_tokens']:,}",
        number(row["tokens_per_second"]),
        number(row["tokens_a_pass"]),
        str(row["sessions"]),
        "" if loop is None else f"{loop:,}",
        row["written"],
    )
