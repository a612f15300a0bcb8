"""Rows that do not measure: for tests of the runner."""

from __future__ import annotations

import os

from benchmarks.settings import Config
from benchmarks.words import Measured
from tokenswift.types import InputError


def measure(kind: str, config: Config) -> Measured:
    """Text 1 dies, text 2 cannot be measured, text 3 fails; all others are there at once."""
    text = config["text"]
    if text == 1:
        os._exit(9)
    if text == 2:
        raise InputError("no such thing")
    if text == 3:
        raise ValueError("bad")
    return {"process": os.getpid()}
