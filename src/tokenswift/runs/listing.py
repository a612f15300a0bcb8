"""What a list of runs says about each."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenswift.metrics import CALIBRATION, PREFILL, decoding
from tokenswift.runs import folder as folders
from tokenswift.types import InputError

LATEST = 253_402_000_000.0  # a date of a file may be anything; this one is in the year 9999


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a run (see :func:`summary_of`) as tables show them, by column; of an unreadable one
    name and state alone."""
    if "tokens" not in row:
        return {"run": row["run"], "state": row["state"]}
    loop = row["loop_start"]
    return {
        "run": row["run"],
        "state": row["state"],
        "tokens": f"{row['tokens']:,}",
        "of": f"{row['max_new_tokens']:,}",
        "tokens/s": f"{row['tokens_per_second']:,.1f}",
        "a pass": f"{row['tokens_a_pass']:.2f}",
        "sessions": str(row["sessions"]),
        "loop from": "" if loop is None else f"{loop:,}",
        "model": f"{row['model']} ({row['dtype']})",
        "strategy": row["strategy"],
        "last written": row["written"],
    }


def find(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those in it that are, by name."""
    if os.path.lexists(folder / folders.JOURNAL):
        return [folder]
    return sorted(path for path in folder.iterdir() if os.path.lexists(path / folders.JOURNAL))


def summary_of(folder: Path) -> dict[str, Any]:
    """State and figures of a run; JSON values. An unreadable journal has only ``run`` and ``state``."""
    try:
        contents, state = folders.load(folder)
    except InputError as error:
        return {"run": str(folder), "state": f"unreadable: {error}"}
    steps, seconds = state.all_steps, state.seconds
    spent = decoding(seconds)
    finished = state.end is not None
    if folders.is_locked(folder):
        word = "running"
    elif contents.damaged:
        word = f"damaged at byte {contents.good}"
    else:
        word = f"finished ({state.end.reason})" if state.end else "interrupted"
    written = time.localtime(min(max(0.0, os.lstat(folder / folders.JOURNAL).st_mtime), LATEST))
    return {
        "run": str(folder),
        "state": word,
        "finished": finished,
        "tokens": len(state.tokens),
        "max_new_tokens": state.session.max_new_tokens,
        "prompt_tokens": len(state.prompt),
        "sessions": len(state.sessions),
        "tokens_per_second": len(state.tokens) / spent if spent else 0.0,
        "tokens_a_pass": len(state.tokens) / len(steps) if steps else 0.0,
        "seconds": spent,
        "prefill_seconds": seconds.get(PREFILL, 0.0),
        "calibration_seconds": seconds.get(CALIBRATION, 0.0),
        "loop_start": state.loop.start if state.loop else None,
        "model": state.header.name,
        "dtype": state.header.identity.dtype,
        "strategy": state.session.strategy,
        "seed": state.header.identity.sampling["seed"],
        "written": time.strftime("%Y-%m-%d %H:%M:%S", written),
    }
