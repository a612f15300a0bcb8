"""The Triton kernels against their references without a card: see `interpreted` and `interpreted_int8`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("interpreted", "interpreted_int8")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("which", [pytest.param("not slow", marks=pytest.mark.defects), "slow"])
def test_kernels_in_the_interpreter(which: str, name: str) -> None:
    pytest.importorskip("triton")
    tests = str(Path(__file__).with_name(f"{name}.py"))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", which, tests],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
