"""What a scheduler counts."""

from __future__ import annotations

#: names of the counts in `Scheduler.figures`
FIGURES = (
    "running",
    "reading",
    "waiting",
    "ended",
    "failed",
    "cancelled",
    "steps",
    "passes",
    "tokens",
)
FIGURES += ("drafted", "accepted", "read", "reused", "rows")
