"""The process of one row. Light: what measures is imported in the process, not where that is started."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

from tokenswift.types import InputError

#: what a process that processes are forked from imports once
PRELOAD = "benchmarks.row"


def child(kind: str, config: dict[str, Any], out: Connection) -> None:
    """Measure; send ``("progress", share)`` …, then ``("row", …)``, ``("unfit", line)`` or
    ``("failed", line)``. The process ends with the one that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    logging.getLogger("tokenswift").setLevel(
        logging.ERROR
    )  # what a run is told a row says: its heads, its rule
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        from benchmarks.row import measure

        out.send(("row", measure(kind, config, lambda share: out.send(("progress", share)))))
    except InputError as error:
        out.send(("unfit", str(error)))
    except Exception as error:  # the runner goes on with the next row, and the user sees one line
        out.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
