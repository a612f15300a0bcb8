"""Several processes and several GPUs (counted, not there), and which options a recipe means."""

from __future__ import annotations

import pytest
import torch

from tokenswift.cli.main import parsed
from tokenswift.cli.train import job_of
from tokenswift.train.loop import local_device, picks, steps_of
from tokenswift.train.options import Job, TrainingOptions
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
    args = parsed(["train", "--out", "h", "--dtype", "float32", *options])
    job, _, device = job_of(args)
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
