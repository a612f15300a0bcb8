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
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_kernels_in_the_interpreter(which: str, name: str) -> None:
    run(name, "-m", which)


def test_layers_in_few_launches_in_the_interpreter() -> None:
    run("interpreted", "-k", "few_launches")


def run(name: str, *chosen: str) -> None:
    """A file's tests in a process of their own."""
    pytest.importorskip("triton")
    tests = str(Path(__file__).with_name(f"{name}.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *chosen, tests],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
