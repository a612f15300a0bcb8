"""Rows that do not measure: for tests of the runner."""

from __future__ import annotations

import os
from typing import Any

from tokenswift.types import InputError


def measure(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Text 1 dies, text 2 cannot be measured, text 3 fails; all others are there at once."""
    text = config["text"]
    if text == 1:
        os._exit(9)
    if text == 2:
        raise InputError("no such thing")
    if text == 3:
        raise ValueError("bad")
    return {"made": os.getpid()}
