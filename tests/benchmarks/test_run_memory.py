"""Memory of a run at its peak."""

from __future__ import annotations

import sys

import pytest

from benchmarks.run_memory import peak_of
from tokenswift.types import RunError


def test_the_peak_of_a_command() -> None:
    megabytes = 64
    waits = "import time; time.sleep(0.5)"
    code = f"x = bytearray({megabytes} << 20); x[::4096] = bytes(len(x) // 4096); {waits}"
    usual = peak_of([sys.executable, "-c", waits])
    assert usual > 0
    assert peak_of([sys.executable, "-c", code]) - usual > megabytes * 0.9 * 2**20


def test_a_command_that_fails() -> None:
    with pytest.raises(RunError, match="ended with code 3"):
        peak_of([sys.executable, "-c", "raise SystemExit(3)"])
