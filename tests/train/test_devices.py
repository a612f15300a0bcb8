"""Several processes and several GPUs (counted, not there), and which options a recipe means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenswift.cli.main import build_parser
from tokenswift.cli.train_heads import job_of
from tokenswift.train.loop import picks, steps_of
from tokenswift.train.options import RECIPES, Job, TrainingOptions
from tokenswift.train.work import local_device, once
from tokenswift.types import InputError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that there are four GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def ranks(monkeypatch: pytest.MonkeyPatch, world: int, rank: int, local: int) -> None:
    for name, value in (("WORLD_SIZE", world), ("RANK", rank), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))


def planned(*options: str) -> tuple[Job, str]:
    """The job of a command, and its device."""
    parser, _ = build_parser()
    args = parser.parse_args(["train-heads", "--out", "h", "--dtype", "float32", *options])
    job, _, device = job_of(args, RECIPES[args.kind])
    return job, device


def test_every_process_takes_the_device_of_its_local_rank(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_device("cuda") == "cuda" and local_device("cuda:1") == "cuda:1"
    for rank, local in ((0, 0), (3, 3), (5, 1)):
        ranks(monkeypatch, 8, rank, local)
        assert local_device("cuda") == f"cuda:{local}"
        assert planned("--data", "self")[1] == f"cuda:{local}"
        assert local_device("cpu") == "cpu"
    with pytest.raises(InputError, match="'cuda:2' for 8 processes.*valid: cuda"):
        local_device("cuda:2")
    ranks(monkeypatch, 8, 7, 7)
    with pytest.raises(InputError, match="local rank 7; .*there are 4"):
        local_device("cuda")


def test_who_makes_and_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process makes what is missing, once; another waits until it is there and makes nothing."""
    made: list[int] = []
    ranks(monkeypatch, 2, 0, 0)
    for _ in range(2):
        once(lambda: bool(made), lambda: made.append(1))
    assert made == [1]
    ranks(monkeypatch, 2, 1, 1)
    looks = iter([False, False, True])
    monkeypatch.setattr("tokenswift.train.work.time.sleep", lambda seconds: made.append(2))
    once(lambda: next(looks), lambda: pytest.fail("made twice"))
    assert made == [1, 2, 2]


def test_every_item_once_an_epoch_whoever_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes, seven items, batches of two accumulated twice: what all take together is an order of
    all items after the other, the same as of one process with larger batches."""
    options = TrainingOptions(batch=2, accumulate=2, epochs=3, seed=5)
    taken: list[list[list[int]]] = []
    for rank in range(3):
        ranks(monkeypatch, 3, rank, rank)
        assert steps_of(7, options) == 2
        taken.append([batch for step in range(7) for batch in picks(7, options, step)])
    whole = [item for batches in zip(*taken, strict=True) for batch in batches for item in batch]
    assert len(whole) == 84 and all(sorted(whole[i : i + 7]) == list(range(7)) for i in range(0, 84, 7))
    assert whole[:7] != whole[7:14]
    ranks(monkeypatch, 1, 0, 0)
    alone = TrainingOptions(batch=6, accumulate=2, seed=5)
    assert [item for step in range(7) for batch in picks(7, alone, step) for item in batch] == whole


def test_the_papers_recipe() -> None:
    """Table 9: AdamW (0.9, 0.999), decay 0.1, warm-up 50, lr 5e-3, 3 sequences of 8K × 10, 200 steps."""
    made, _ = planned("--data", "pg19", "--kind", "linear")
    t = made.training
    assert (t.lr, t.weight_decay, t.beta2, t.warmup, t.steps) == (5e-3, 0.1, 0.999, 50, 200)
    assert t.batch * t.window * t.accumulate == 3 * 8192 * 10
    assert (t.targets, t.loss_vocabulary) == ("text", 0)
    assert made.data is not None and made.data.sequence_length == 8192 and not made.data.continued
    own, _ = planned(
        "--data", "pg19", "--kind", "linear", "--lr", "0.001", "--steps", "600", "--block", "4096"
    )
    assert (own.training.lr, own.training.steps, own.training.warmup) == (1e-3, 600, 50)
    assert own.data is not None and own.data.sequence_length == 4096
    assert planned("--data", "self")[0].training.targets == "model"


def test_options_reach_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    options = [
        "--data",
        str(tmp_path),
        "--continued",
        "--prompt",
        "32,64",
        "--batch",
        "2",
        "--write-batch",
        "6",
    ]
    options += ["--top-p", "0.9", "--top-k", "7", "--penalty-window", "99", "--seed", "5", "--block", "100"]
    made, _ = planned(*options)
    assert made.data is not None and made.data.prompt_lengths == (32, 64) and made.data.continued
    assert (made.data.write_batch, made.training.batch, made.training.loss_vocabulary) == (6, 2, 4096)
    assert made.training.seed == made.sampling.seed == 5
    assert (made.sampling.top_p, made.sampling.top_k, made.sampling.penalty_window) == (0.9, 7, 99)
    for bad, message in (("64,32", "ascending"), ("90", "prompt_lengths is 90")):
        with pytest.raises(InputError, match=message):
            planned("--data", str(tmp_path), "--continued", "--block", "100", "--prompt", bad)
    with pytest.raises(InputError, match="not both"):
        planned()
