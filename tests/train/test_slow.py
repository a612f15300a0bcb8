"""Training of heads for the default model: kill and resume, and text from nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train.test_train import environment, losses, steps, words
from tokenswift.spec.heads.checkpoint import read_heads


def cli(*options: str) -> list[str]:
    return [sys.executable, "-m", "tokenswift.cli.main", "train-heads", *options]


def small(folder: Path, data: str) -> list[str]:
    """A small training of the default model's heads: 4,000 tokens, 60 steps."""
    sizes = ["--tokens", "4000", "--block", "256", "--heads", "2", "--inner", "128", "--vocabulary", "1024"]
    times = ["--prompt", "64", "--steps", "60", "--save-every", "10", "--quiet"]
    return cli("--data", data, "--out", str(folder / "h.safetensors"), "--work", str(folder / "work"),
               *sizes, *times)  # fmt: skip


def killed_after(command: list[str], found: Path, seconds: float = 300) -> None:
    """Run a command, and kill it (-9) once a path matching the last part of ``found`` exists."""
    process = subprocess.Popen(command, env=environment(), stdout=-3, stderr=-3)
    deadline = time.monotonic() + seconds
    while not list(found.parent.glob(found.name)) and time.monotonic() < deadline:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.model
def test_kill_and_resume_on_the_default_model(embedded: str, tmp_path: Path) -> None:
    """Kill -9 while states are collected, and again in training: the loss ends as in an unbroken run."""
    (tmp_path / "text.txt").write_text(" ".join(words(800, seed) for seed in range(6)))
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    subprocess.run(small(calm, str(tmp_path / "text.txt")), env=environment(), check=True)
    command = small(killed, str(tmp_path / "text.txt"))
    killed_after(command, killed / "work" / "states" / "index.json")
    collected = len(json.loads((killed / "work" / "states" / "index.json").read_text())["blocks"])
    killed_after(command, killed / "work" / "checkpoint.pt")
    assert not (killed / "h.safetensors").exists() and collected > 0
    done = torch.load(killed / "work" / "checkpoint.pt")["step"]
    before = len(steps(killed))
    subprocess.run(command, env=environment(), check=True)
    assert min(steps(killed)[before:], default=99) > done  # no step up to the checkpoint again
    print(f"loss at the end: unbroken {losses(calm)[-1]}, killed twice {losses(killed)[-1]}")
    assert losses(killed)[-1] == pytest.approx(losses(calm)[-1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.model
def test_text_from_nothing_on_the_default_model(embedded: str, tmp_path: Path) -> None:
    """``--data self``: no text at all is needed."""
    out = tmp_path / "h.safetensors"
    command = cli("--data", "self", "--tokens", "600", "--block", "150", "--prompt", "64", "--quiet",
                  "--steps", "3", "--heads", "2", "--inner", "64", "--vocabulary", "512",
                  "--out", str(out))  # fmt: skip
    subprocess.run(command, env=environment() | {"HF_HUB_OFFLINE": "1"}, check=True)
    heads, _, notes = read_heads(out)
    assert notes["data"] == "self" and notes["steps"] == 3 and notes["tokens"] == 4 * 150
    assert os.path.getsize(out) > 1000 and heads is not None
