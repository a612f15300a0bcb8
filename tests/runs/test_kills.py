"""Kills at random moments: every start goes on, and the final tokens are the uninterrupted
run's."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenswift import LLM, SamplingParams
from tokenswift.runs import folder as folders
from tokenswift.runs.folder import SYNC_SECONDS

SLACK = 1.0  # seconds for a thread to wake and a disk to write, on a busy machine
CHILD = """
import sys, time
from tests.runs.test_kills import write
def told(step):
    print(len(step.token_ids), time.monotonic(), flush=True)
    time.sleep(float(sys.argv[5]))
write(*sys.argv[1:3], int(sys.argv[3]), run_dir=sys.argv[4], on_step=told)
"""


def write(model: str, dtype: str, tokens: int, **how: object) -> list[int]:
    prompt = "The lamp at Sallow Point had gone out, and"
    sampling = SamplingParams(seed=7)
    with LLM(model, dtype=dtype, device="cpu", threads=1) as llm:
        call: dict = {"sampling": sampling, "ignore_eos": True, **how}
        return llm.generate(prompt, tokens, **call).token_ids


def kept_in(folder: Path) -> int:
    return len(folders.load(folder)[1].tokens) if folders.has_run(folder) else 0


def check(model: str, dtype: str, folder: Path, tokens: int, kills: int, pause: float) -> None:
    chance = random.Random(7)
    command = [sys.executable, "-c", CHILD, model, dtype, str(tokens), str(folder), str(pause)]
    places = []
    while len(places) < kills:
        before = kept_in(folder)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            most = 2 * (tokens - before) // (kills - len(places) + 1)
            lines = [
                line
                for _, line in zip(range(chance.randint(1, most)), process.stdout, strict=False)
            ]
            process.kill()
            killed = time.monotonic()
        steps = [line.split() for line in lines]
        old = sum(int(n) for n, when in steps if float(when) < killed - SYNC_SECONDS - SLACK)
        places.append(kept_in(folder))
        assert places[-1] >= before + old, (before, places, old)
    text = write(model, dtype, tokens, run_dir=folder)
    assert text == write(model, dtype, tokens), places
    assert sum(0 < at < tokens for at in places) >= kills // 3, places
    state = folders.load(folder)[1]
    assert (folder / "text.txt").read_bytes().decode() == state.text + state.tail
    assert len(state.sources) == len(state.chars) == tokens
    assert state.end is not None


@pytest.mark.slow
def test_four_kills(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A tiny model, slowed down so that several syncs fall between two kills."""
    check(str(tiny_folder(max_position_embeddings=1024)), "float32", tmp_path / "run", 300, 4, 0.03)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thirty_kills(dtype: str, tmp_path: Path) -> None:
    """The default model, 1,500 tokens."""
    check("smollm2-135m", dtype, tmp_path / "run", 1500, 30, 0.0)
