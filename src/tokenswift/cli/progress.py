"""Progress on standard error."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

#: stages (`types.OnProgress`) whose names say too little
STAGES = {
    "prompt": "prefill",
    "write": "the model writes",
    "fetch": "fetching the model, MB",
    "compile": "compiling the kernels (once), part",
}


class Stages:
    """A moving line on standard error, where that is a terminal, that says how far the work is;
    called as `types.OnProgress` says. The line goes away when its stage ends.

    Args:
        quiet: show nothing.
        doing: what a ``with`` block shows before its first stage.
    """

    def __init__(self, quiet: bool = False, doing: str = "working") -> None:
        plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        self._is_shown = sys.stderr.isatty() and not quiet and not plain
        self._doing = doing
        self._line: Progress | None = None
        self._lock = RLock()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if total is not None and done >= total:
            return self.end()
        of = "" if total is None else f" of {total:,}"
        text = STAGES.get(stage, stage) + (f": {done:,}{of}" if done or of else "")
        with self._lock:  # files of a model are read in several threads
            if self._is_shown and self._line is None:
                self._line = _moving_line()
            if self._line is not None:
                self._line.update(
                    self._line.task_ids[0], completed=done, total=total, description=text
                )

    def end(self) -> None:
        """Take the line away; the next stage has a new one."""
        with self._lock, suppress(OSError):  # the terminal may be gone
            line = self._line
            self._line = None
            if line is not None:
                line.stop()

    def __enter__(self) -> Stages:
        self(self._doing, 0, None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def _moving_line() -> Progress:
    """A line of rich's: a bar, a text, and the time. The cursor stays: a second signal ends the
    program at once."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class ConsoleWithCursor(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    line = Progress(
        BarColumn(16),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=ConsoleWithCursor(file=sys.stderr, highlight=False),
        redirect_stdout=False,
        transient=True,
    )
    line.add_task("")
    line.start()
    return line
