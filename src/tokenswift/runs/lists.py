"""What lists of runs say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, final

from tokenswift.metrics import PREFILL
from tokenswift.runs.folder import JOURNAL, has_run, is_locked, load
from tokenswift.types import InputError

LATEST = 253_402_000_000.0  # a date of a file may be anything; this one is in the year 9999


@final
class UnreadableRun(TypedDict):
    """What can be said of a run whose journal cannot be read."""

    run: str
    state: str


@final
class RunSummary(TypedDict):
    """State and figures of a run: JSON values.

    ``run`` is its folder, ``finished`` whether its text has ended, ``seconds`` the time of its
    steps, ``loop_start`` where the text began to repeat itself, and ``written`` when its journal
    was last written, in local time.
    """

    run: str
    state: str
    finished: bool
    tokens: int
    max_new_tokens: int
    prompt_tokens: int
    sessions: int
    tokens_per_second: float
    tokens_a_pass: float
    seconds: float
    prefill_seconds: float
    loop_start: int | None
    litany_start: int | None
    model: str
    dtype: str
    strategy: str
    seed: int
    written: str


def summaries(folder: Path) -> list[RunSummary | UnreadableRun]:
    """The figures of a run, or of all runs in a folder by name.

    Raises:
        InputError: there is no such folder.
    """
    if not folder.is_dir():
        raise InputError(f"folder is {str(folder)!r}: no such folder; valid: one with runs in it")
    if has_run(folder):
        return [summary_of(folder)]
    return [summary_of(path) for path in sorted(folder.iterdir()) if has_run(path)]


def summary_of(folder: Path) -> RunSummary | UnreadableRun:
    """State and figures of a run."""
    try:
        contents, state = load(folder)
    except InputError as error:
        return {"run": str(folder), "state": f"unreadable: {error}"}
    prefill = state.seconds.get(PREFILL, 0.0)
    tokens = len(state.tokens)
    spent = sum(state.seconds.values()) - prefill
    written = time.localtime(min(max(0.0, os.lstat(folder / JOURNAL).st_mtime), LATEST))
    if is_locked(folder):
        word = "running"
    elif contents.damaged:
        word = f"damaged at byte {contents.good}"
    else:
        word = f"finished ({state.end.reason})" if state.end else "interrupted"
    return {
        "run": str(folder),
        "state": word,
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
        "litany_start": state.litany.start if state.litany else None,
        "model": state.header.name,
        "dtype": state.header.identity.dtype,
        "strategy": state.session.strategy,
        "seed": state.header.identity.params.seed,
        "written": time.strftime("%Y-%m-%d %H:%M:%S", written),
    }


def cells(row: RunSummary | UnreadableRun, few: bool = False) -> dict[str, str]:
    """The figures of a run as tables show them, by column; of an unreadable one name and state
    alone.

    Args:
        few: the columns that a terminal has room for.
    """
    columns = FEW_COLUMNS if few else COLUMNS
    if "tokens" not in row:
        return {name: "" for name in columns} | {"run": row["run"], "state": row["state"]}
    return {name: show(row) for name, show in columns.items()}


#: columns of a list of runs, with all figures
COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda row: row["run"],
    "state": lambda row: row["state"],
    "tokens": lambda row: f"{row['tokens']:,}",
    "of": lambda row: f"{row['max_new_tokens']:,}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "a pass": lambda row: f"{row['tokens_a_pass']:.2f}",
    "sessions": lambda row: str(row["sessions"]),
    "loop from": lambda row: "" if row["loop_start"] is None else f"{row['loop_start']:,}",
    "litany from": lambda row: "" if row["litany_start"] is None else f"{row['litany_start']:,}",
    "model": lambda row: f"{row['model']} ({row['dtype']})",
    "strategy": lambda row: row["strategy"],
    "last written": lambda row: row["written"],
}
#: columns of a list that a terminal has room for
FEW_COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "run": COLUMNS["run"],
    "state": COLUMNS["state"],
    "tokens": lambda row: f"{row['tokens']:,} of {row['max_new_tokens']:,}",
    "tokens/s": COLUMNS["tokens/s"],
    "last written": lambda row: row["written"][:16],
}
