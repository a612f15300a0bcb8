"""Rows that do not measure: for tests of the runner."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any


def child(kind: str, config: dict[str, Any], out: Connection) -> None:
    """Text 1 dies, text 2 cannot be measured, text 3 fails; all others are there at once."""
    text = config["text"]
    if text == 1:
        os._exit(9)
    if text == 2:
        out.send(("unfit", "no such thing"))
    elif text == 3:
        out.send(("failed", "ValueError: bad"))
    else:
        out.send(("progress", 0.5))
        out.send(("row", {"made": os.getpid()}))
