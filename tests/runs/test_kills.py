"""Kills at random moments: every resume goes on, and the final tokens are the uninterrupted run's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def killed(model: str, dtype: str, folder: Path, tokens: int, kills: int, pause: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.runs.kills", model, dtype, str(folder), str(tokens), str(kills)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "7", str(pause)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found: dict[str, Any], kills: int) -> None:
    assert found["kills"] == kills and found["equal_bits"]
    assert found["same_tokens"] and found["same_text"] and found["same_sources"]
    assert found["reason"] == "length"
    assert [row["lost_too_old"] for row in found["rows"]] == [0] * len(found["rows"])
    kept = [row["kept"] for row in found["rows"]]
    assert kept == sorted(kept) and sum(0 < k < kept[-1] for k in kept) >= kills // 3, kept


@pytest.mark.slow
def test_four_kills(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A tiny model, slowed down so that several syncs fall between two kills."""
    model = tiny_folder(max_position_embeddings=1024)
    check(killed(str(model), "float32", tmp_path / "run", 300, 4, 0.01), 4)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thirty_kills(dtype: str, tmp_path: Path) -> None:
    """The default model, 1,500 tokens."""
    check(killed("smollm2-135m", dtype, tmp_path / "run", 1500, 30, 0.0), 30)
