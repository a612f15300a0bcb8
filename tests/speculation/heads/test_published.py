"""Published checkpoints load as they are: logits by definition, the check of their base, faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import tiny_model
from tokenswift.loader.host import host_of
from tokenswift.speculation.heads.find import load_heads, resolve_heads
from tokenswift.speculation.heads.modules import Heads
from tokenswift.types import InputError

D = 32
V = 260


def published(
    folder: Path, form: str = "safetensors", seed: int = 0
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A checkpoint in the published layout."""
    model = tiny_model(seed=seed)
    torch.manual_seed(9)
    extra = {}
    for i in range(3):
        extra[f"model.medusa_layers.{i}.linear.weight"] = torch.randn(D, D) * 0.2
        extra[f"model.medusa_layers.{i}.input_layernorm.weight"] = torch.rand(D) + 0.5
        extra[f"model.medusa_layers.{i}.post_layernorm.weight"] = torch.rand(D) + 0.5
    weights = {k: v.clone() for k, v in model.state_dict().items()} | extra
    folder.mkdir()
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        names = sorted(weights)
        where = {
            name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)
        }
        for file in set(where.values()) if form == "sharded" else ("model.safetensors",):
            part = {
                name: weights[name] for name in names if form != "sharded" or where[name] == file
            }
            save_file(part, folder / file, metadata={"format": "pt"})
        if form == "sharded":
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = model.config.to_dict() | {"medusa_heads": 3, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model, extra


def by_definition(
    model: Any, extra: dict[str, torch.Tensor], hidden: torch.Tensor
) -> list[torch.Tensor]:
    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()

    logits = []
    state = hidden
    for i in range(3):
        w = {k.partition(f"{i}.")[2]: v for k, v in extra.items() if f"layers.{i}." in k}
        state = state + rms(state, w["input_layernorm.weight"]) @ w["linear.weight"].T
        logits.append(model.lm_head(rms(state, w["post_layernorm.weight"])))
    return logits


def by_heads(model: Any, heads: Heads, hidden: torch.Tensor) -> list[torch.Tensor]:
    logits = []
    state = hidden
    for i in range(heads.count):
        state = heads.advance(i, state, hidden, None)
        logits.append(model.lm_head(heads.normed(i, state)))
    return logits


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded"])
@torch.no_grad()
def test_published_heads_give_the_logits_of_the_definition(form: str, tmp_path: Path) -> None:
    model, extra = published(tmp_path / "c", form)
    hidden = torch.randn(6, D)
    heads = load_heads(tmp_path / "c", host_of(model))
    for mine, want in zip(
        by_heads(model, heads, hidden), by_definition(model, extra, hidden), strict=True
    ):
        torch.testing.assert_close(mine, want)
    # a model that was loaded from there has them, too
    model.config._name_or_path = str(tmp_path / "c")
    loaded = resolve_heads("auto", host_of(model))
    assert loaded is not None
    assert loaded.source == str(tmp_path / "c")
    assert heads.source == str(tmp_path / "c")
    with pytest.raises(InputError, match="weights differ"):
        load_heads(tmp_path / "c", host_of(tiny_model(seed=3)))


LINEAR = "model.medusa_layers.1.linear.weight"
TIED = "model.embed_tokens.weight"
BAD: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    r"medusa_layers.1.linear.weight is \(32, 33\)": lambda tensors: tensors.update(
        {LINEAR: torch.zeros(D, D + 1)}
    ),
    "lacks the tensor layers.1.linear.weight": lambda tensors: tensors.pop(LINEAR),
    "lacks the tensor layers.0": lambda tensors: [
        tensors.pop(name) for name in [*tensors] if "medusa" in name
    ],
    "lacks one of the weights .*embed_tokens": lambda tensors: tensors.update(
        {TIED: torch.zeros(0, D)}
    ),
    "not finite": lambda tensors: tensors[LINEAR].fill_(torch.nan),
}


@pytest.mark.parametrize("message", BAD)
def test_faults_are_one_line_errors(message: str, tmp_path: Path) -> None:
    model, _ = published(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    tensors = load_file(file)
    BAD[message](tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=message) as caught:
        load_heads(tmp_path / "c", host_of(model))
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_heads_by_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = published(tmp_path / "c")
    fetched_ids = list[str]()

    def fetched(name: str) -> str:
        fetched_ids.append(name)
        return str(tmp_path / "c")

    monkeypatch.setattr("tokenswift.speculation.heads.find.fetch", fetched)
    assert load_heads("owner/heads", host_of(model)).count == 3
    assert fetched_ids == ["owner/heads"]
