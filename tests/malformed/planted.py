"""Ends of a run that the corpus must not have: what the test of it must see."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from tokenswift.types import InputError


def crash() -> None:
    """As a read of foreign memory ends."""
    os.kill(os.getpid(), signal.SIGSEGV)


def trip() -> None:
    """An error that nobody looks after."""
    raise ZeroDivisionError


def swallow() -> None:
    """Memory, and then the usual line."""
    with suppress(MemoryError):
        bytearray(5 << 28)[::4096] = b"x" * (5 << 16)
    raise InputError("this was too much")


def hang() -> None:
    """No end."""
    while True:
        pass


def talk() -> None:
    """More than a line."""
    os.write(2, b"thread panicked at lib.rs:1\n")
    raise InputError("this was more than a line")


def refuse() -> None:
    """As it should be."""
    raise InputError("this file is wrong")


ENDS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (crash, trip, swallow, hang, talk, refuse)
}
