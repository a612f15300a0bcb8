"""The Triton kernels against torch without a card: see `interpreted`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    run()


def test_some_kernels_in_the_interpreter() -> None:
    """Attention with a window and a cap, and the layer that takes the other way at most switches;
    the usual layer's passes are in `test_backend`, with the kernels' work by torch."""
    run("-k", "700 or switched")


def run(*chosen: str) -> None:
    """Tests in a process of their own."""
    pytest.importorskip("triton")
    tests = str(Path(__file__).with_name("interpreted.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *chosen, tests],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
