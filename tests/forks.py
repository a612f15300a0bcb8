"""The process that tests fork others from: there is one in each worker, so it loads what any of
them needs, whichever starts it."""

from __future__ import annotations

from multiprocessing import forkserver

LOADED = ["benchmarks.row", "tests.benchmarks.crashing", "tests.malformed.preload"]


def start_forkserver() -> None:
    """Start it where it can import all of them, unless it runs."""
    forkserver.set_forkserver_preload(LOADED)
    forkserver.ensure_running()
