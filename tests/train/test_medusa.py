"""Training of Medusa heads: where they start, the whole way with resume, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_model
from tests.train.test_train import D, filled, frozen, full_run, losses, words
from tokenswift.loader.identity import base_of
from tokenswift.spec.heads.checkpoint import load_heads
from tokenswift.spec.heads.modules import Heads
from tokenswift.train.options import TrainingOptions
from tokenswift.train.pipeline import heads_config
from tokenswift.train.ridge import ridge_start
from tokenswift.types import InputError


@torch.no_grad()
def test_medusa_starts_as_the_base(tmp_path: Path) -> None:
    model = tiny_model()
    torch.nn.init.uniform_(model.base_model.norm.weight, 0.5, 1.5)
    base = frozen(model)
    heads = Heads(heads_config("medusa", 2, base_of(model), None, 1e-6))
    assert heads.config.blocks == 1 and not heads.own_lm_heads
    ridge_start(heads, [filled(tmp_path, model)], base)
    states = torch.randn(5, D) * 3
    for i in range(2):
        normed = heads.normed(i, heads.advance(i, states, states, None))
        torch.testing.assert_close(normed, base.normed(states))


def test_sizes_of_heads() -> None:
    base = base_of(tiny_model())
    assert heads_config("conditioned", 2, base, None).inner == 1024
    assert heads_config("medusa", 2, base, None, blocks=3).blocks == 3
    with pytest.raises(InputError, match="blocks is 0; valid: at least 1 residual block"):
        heads_config("medusa", 2, base, None, blocks=0)


def test_the_whole_way_of_medusa_heads(tmp_path: Path) -> None:
    model = tiny_model()
    (tmp_path / "t.txt").write_text(words(800))
    training = TrainingOptions(steps=24, save_every=12, log_every=8, lr=0.01, bf16=False)
    lines = full_run(model, str(tmp_path / "t.txt"), tmp_path, training, "medusa", blocks=2)
    assert lines["kind"] == "medusa"
    heads = load_heads(tmp_path / "h.safetensors", model)
    assert heads.kind == "medusa" and heads.config.blocks == 2
    assert heads.frequent is not None
    rates = losses(tmp_path)
    assert rates[-1] < rates[0]
    (tmp_path / "h.safetensors").unlink()
    again = full_run(model, str(tmp_path / "t.txt"), tmp_path, training, "medusa", blocks=2)
    assert again["steps"] == 24 and losses(tmp_path) == rates  # nothing was left to do
    resumed = load_heads(tmp_path / "h.safetensors", model).state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in heads.state_dict().items())


def test_checkpoints_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(words(800))
    training = TrainingOptions(steps=2, save_every=2, bf16=False)
    full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, training, "medusa", blocks=1)
    with pytest.raises(InputError, match="another training .heads differ.; name another --work"):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, training, "linear")
