"""What lists of runs say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenswift.metrics import PREFILL
from tokenswift.runs.folder import JOURNAL, is_locked, load
from tokenswift.types import InputError

LATEST = 253_402_000_000.0  # a date of a file may be anything; this one is in the year 9999


def summaries(folder: Path) -> list[dict[str, Any]]:
    """The figures of a run, or of all runs in a folder by name.

    Raises:
        InputError: there is no such folder.
    """
    if not folder.is_dir():
        raise InputError(f"folder is {str(folder)!r}: no such folder; valid: one with runs in it")
    found = [folder, *sorted(folder.iterdir())]
    runs = [path for path in found if os.path.lexists(path / JOURNAL)]
    return [summary_of(path) for path in (runs[:1] if runs[:1] == [folder] else runs)]


def summary_of(folder: Path) -> dict[str, Any]:
    """State and figures of a run; JSON values. An unreadable journal has only ``run`` and
    ``state``."""
    try:
        contents, state = load(folder)
    except InputError as error:
        return {"run": str(folder), "state": f"unreadable: {error}"}
    prefill, tokens = state.seconds.get(PREFILL, 0.0), len(state.tokens)
    spent = sum(state.seconds.values()) - prefill
    written = time.localtime(min(max(0.0, os.lstat(folder / JOURNAL).st_mtime), LATEST))
    word = f"finished ({state.end.reason})" if state.end else "interrupted"
    damaged = f"damaged at byte {contents.good}" if contents.damaged else ""
    return {
        "run": str(folder),
        "state": "running" if is_locked(folder) else damaged or word,
        "finished": state.end is not None,
        "tokens": tokens,
        "max_new_tokens": state.session.max_new_tokens,
        "prompt_tokens": len(state.header.prompt),
        "sessions": len(state.sessions),
        "tokens_per_second": tokens / spent if spent else 0.0,
        "tokens_a_pass": tokens / max(1, len(state.steps)),
        "seconds": spent,
        "prefill_seconds": prefill,
        "loop_start": state.loop.start if state.loop else None,
        "model": state.header.name,
        "dtype": state.header.identity.dtype,
        "strategy": state.session.strategy,
        "seed": state.header.identity.params.seed,
        "written": time.strftime("%Y-%m-%d %H:%M:%S", written),
    }


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a run (see :func:`summary_of`) as tables show them, by column; of an
    unreadable one name and state alone."""
    if "tokens" not in row:
        return {"run": row["run"], "state": row["state"]}
    return {name: show(row) for name, show in COLUMNS.items()}


#: columns of a list of runs
COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "run": lambda row: row["run"],
    "state": lambda row: row["state"],
    "tokens": lambda row: f"{row['tokens']:,}",
    "of": lambda row: f"{row['max_new_tokens']:,}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "a pass": lambda row: f"{row['tokens_a_pass']:.2f}",
    "sessions": lambda row: str(row["sessions"]),
    "loop from": lambda row: "" if row["loop_start"] is None else f"{row['loop_start']:,}",
    "model": lambda row: f"{row['model']} ({row['dtype']})",
    "strategy": lambda row: row["strategy"],
    "last written": lambda row: row["written"],
}
