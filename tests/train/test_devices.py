"""Several processes and several GPUs (counted, not there), and which options a recipe means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_model
from tests.train.test_train import D, filled, frozen
from tokenswift.cli.main import build_parser
from tokenswift.cli.train_heads import job_of
from tokenswift.loader.identity import base_of
from tokenswift.spec.heads.modules import Heads
from tokenswift.train.loss import Distillation
from tokenswift.train.options import RECIPES, Job, TrainingOptions
from tokenswift.train.pipeline import heads_config
from tokenswift.train.processes import local_device, once
from tokenswift.train.ridge import zero_start
from tokenswift.train.store import Windows
from tokenswift.train.trainer import arguments
from tokenswift.types import InputError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that there are GPUs; returns the list of devices that were made the current one."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    return current


def ranks(monkeypatch: pytest.MonkeyPatch, world: int, rank: int, local: int) -> None:
    for name, value in (("WORLD_SIZE", world), ("RANK", rank), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))


def planned(*options: str) -> Job:
    parser, _ = build_parser()
    return job_of(parser.parse_args(["train-heads", "--out", "h", "--dtype", "float32", *options]))


def test_every_process_takes_the_device_of_its_local_rank(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_device("cuda") == "cuda" and local_device("cuda:1") == "cuda:1"
    for rank, local in ((0, 0), (3, 3), (5, 1)):
        ranks(monkeypatch, 8, rank, local)
        assert local_device("cuda") == f"cuda:{local}"
        assert planned("--data", "self").device == f"cuda:{local}"
        assert local_device("cpu") == "cpu"
    with pytest.raises(InputError, match="'cuda:2' for 8 processes; valid: cuda"):
        local_device("cuda:2")
    ranks(monkeypatch, 8, 7, 7)
    with pytest.raises(InputError, match="local rank 7, but there are 4"):
        local_device("cuda")


def test_one_process_works_on_its_device_alone(gpus: Any, tmp_path: Path) -> None:
    """No data parallelism over what it happens to see, and not the first device but the one asked for."""
    args = arguments(TrainingOptions(bf16=False), tmp_path, torch.device("cuda:1"))
    assert args.n_gpu == 1 and args.device == torch.device("cuda:1") and gpus[-1] == "cuda:1"
    assert args.train_batch_size == 4


def test_who_makes_and_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process makes what is missing, once; another waits until it is there and makes nothing."""
    made: list[int] = []
    ranks(monkeypatch, 2, 0, 0)
    for _ in range(2):
        once(lambda: bool(made), lambda: made.append(1))
    assert made == [1]
    ranks(monkeypatch, 2, 1, 1)
    looks = iter([False, False, True])
    monkeypatch.setattr("tokenswift.train.processes.time.sleep", lambda seconds: made.append(2))
    once(lambda: next(looks), lambda: pytest.fail("made twice"))
    assert made == [1, 2, 2]


def test_the_papers_recipe() -> None:
    """Table 9: AdamW (0.9, 0.999), decay 0.1, warm-up 50, lr 5e-3, 3 sequences of 8K × 10, 200 steps."""
    made = planned("--data", "pg19", "--recipe", "paper")
    t = made.training
    assert (t.lr, t.weight_decay, t.beta2, t.warmup, t.steps) == (5e-3, 0.1, 0.999, 50, 200)
    assert t.batch * t.window * t.accumulate == 3 * 8192 * 10
    assert (t.targets, t.start, made.vocabulary) == ("text", "zero", 0)
    assert (RECIPES["paper"]["kind"], RECIPES["paper"]["heads"]) == ("linear", 3)
    assert made.data is not None and made.data.sequence_length == 8192 and not made.data.continued
    own = planned("--data", "pg19", "--recipe", "paper", "--lr", "0.001", "--steps", "600", "--block", "4096")
    assert (own.training.lr, own.training.steps, own.training.warmup) == (1e-3, 600, 50)
    assert own.data is not None and own.data.sequence_length == 4096
    with pytest.raises(InputError, match="recipe is 'fast'; valid: own, paper"):
        planned("--data", "self", "--recipe", "fast")


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
    options += [
        "--write-batch",
        "6",
        "--top-p",
        "0.9",
        "--top-k",
        "7",
        "--penalty-window",
        "99",
        "--seed",
        "5",
        "--block",
        "100",
    ]
    made = planned(*options)
    assert made.data is not None and made.data.prompt == (32, 64) and made.data.continued
    assert (made.data.write_batch, made.training.batch) == (6, 2)
    assert made.data.seed == made.training.seed == made.learnt.seed == 5
    assert made.data.sampling == made.sampling
    assert (made.learnt.top_p, made.learnt.top_k, made.learnt.penalty_window) == (0.9, 7, 99)
    for bad, message in (("64,32", "ascending"), ("90", "prompt is 90")):
        with pytest.raises(InputError, match=message):
            planned("--data", str(tmp_path), "--continued", "--block", "100", "--prompt", bad)
    with pytest.raises(InputError, match="not both"):
        planned()


@torch.no_grad()
def test_loss_on_the_texts_tokens_by_definition(tmp_path: Path) -> None:
    model = tiny_model()
    store = filled(tmp_path, model, (40,))
    heads = Heads(heads_config("linear", 2, base_of(model), None, 1e-6))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    item = Windows(store, 2, 16, 0)[0]
    got = Distillation(heads, frozen(model), None, "text")(**{k: v[None] for k, v in item.items()})["losses"]  # type: ignore[arg-type]
    tokens, bits = store.arrays()
    states = torch.from_numpy(bits.copy()).view(torch.bfloat16)[:16].float()
    state = states
    for i in range(2):
        state = heads.advance(i, state, states, None)
        logits = model.lm_head(heads.normed(i, state))
        truth = torch.from_numpy(tokens.astype("int64"))[2 + i : 18 + i]
        rows = torch.nn.functional.cross_entropy(logits, truth, reduction="none")
        want = rows[: 16 if i == 0 else 15].mean()  # the last head's last token is beyond the window
        torch.testing.assert_close(got[i], want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "medusa"])
def test_heads_at_zero_say_what_the_model_says(kind: str) -> None:
    model = tiny_model()
    torch.nn.init.uniform_(model.base_model.norm.weight, 0.5, 1.5)
    base = frozen(model)
    heads = Heads(heads_config(kind, 2, base_of(model), None, 1e-6))
    zero_start(heads, base)
    states = torch.randn(5, D) * 3
    for i in range(2):
        normed = heads.normed(i, heads.advance(i, states, states, None))
        torch.testing.assert_close(normed, base.normed(states), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="conditioned heads have not"):
        zero_start(Heads(heads_config("conditioned", 2, base_of(model), 8)), base)
