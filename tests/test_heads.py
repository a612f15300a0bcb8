"""Draft heads: definitions, file format, and the check against the base model."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_model
from tokenswift.heads.checkpoint import (
    METADATA_KEY,
    base_of,
    load_heads,
    packaged_heads,
    read_heads,
    resolve_heads,
    save_heads,
)
from tokenswift.heads.modules import Heads, HeadsConfig
from tokenswift.types import InputError

D, V = 16, 40


def tiny(seed: int = 0, width: int = D) -> Any:
    shape: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return tiny_model("llama", seed=seed, vocab_size=V, **shape)


def cast(dtype: torch.dtype) -> torch.nn.Module:
    torch.nn.Module.to(model := tiny(), dtype)
    return model


def random_heads(kind: str, inner: int = 0) -> Heads:
    torch.manual_seed(1)
    heads = Heads(HeadsConfig(kind=kind, count=3, hidden_size=D, vocab_size=V, inner=inner)).eval()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.requires_grad_(False)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def test_linear_heads_are_the_papers() -> None:
    heads = random_heads("linear")
    base = torch.randn(5, D)
    state = base
    for i in range(3):
        weights = {k.removeprefix(f"layers.{i}."): v for k, v in heads.state_dict().items()}
        want = state + rms(state, weights["input_layernorm.weight"]) @ weights["linear.weight"].T
        state = heads.advance(i, state, base, None)
        torch.testing.assert_close(state, want)
        torch.testing.assert_close(heads.normed(i, state), rms(want, weights["post_layernorm.weight"]))
    assert not heads.conditioned


def test_conditioned_heads_by_definition() -> None:
    heads = random_heads("conditioned", inner=8)
    assert heads.conditioned and len(heads.layers) == 1
    base, embeds = torch.randn(5, D), torch.randn(5, D)
    w = {k.removeprefix("layers.0."): v for k, v in heads.state_dict().items()}
    state = base
    for i in range(3):
        norm = w["first_norm.weight"] if i == 0 else w["state_norm.weight"]
        parts = (rms(state, norm), rms(base, w["base_norm.weight"]), rms(embeds, w["embed_norm.weight"]))
        x = torch.cat(parts, -1)
        inner = torch.relu(x @ w["inner.weight"].T + w["inner.bias"])
        want = x @ w["linear.weight"].T + w["linear.bias"] + inner @ w["outer.weight"].T
        state = heads.advance(i, state, base, embeds)
        torch.testing.assert_close(state, want)
    with pytest.raises(ValueError, match="embeds"):
        heads.advance(0, base, base, None)


def test_headers_of_earlier_versions_are_read() -> None:
    """Medusa's blocks were called inner, and heads named their number of steps."""
    old = {"kind": "medusa", "count": 2, "hidden_size": D, "vocab_size": V, "inner": 3, "steps": 1}
    assert HeadsConfig.from_dict(old) == HeadsConfig("medusa", 2, D, V, blocks=3)
    old = {"kind": "conditioned", "count": 2, "hidden_size": D, "vocab_size": V, "inner": 3, "steps": 1}
    assert HeadsConfig.from_dict(old) == HeadsConfig("conditioned", 2, D, V, inner=3)


@pytest.mark.parametrize("kind", ["linear", "conditioned", "medusa"])
def test_copies_are_of_the_same_kind(kind: str) -> None:
    heads = random_heads(kind)
    heads.frequent = torch.tensor([3, 4])
    for other in (copy.deepcopy(heads), pickle.loads(pickle.dumps(heads))):
        assert type(other) is type(heads) and other.kind == kind and other.frequent is not None
        for name, tensor in heads.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor)


@pytest.mark.parametrize("kind,inner", [("linear", 0), ("conditioned", 8), ("conditioned", 0), ("medusa", 2)])
def test_file_round_trip(kind: str, inner: int, tmp_path: Path) -> None:
    model, heads = tiny(), random_heads(kind, inner)
    save_heads(heads, tmp_path / "a.safetensors", base_of(model), torch.float32, {"steps": 5})
    again, base, notes = read_heads(tmp_path / "a.safetensors")
    assert again.config == heads.config and notes == {"steps": 5} and base.hidden_size == D
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    loaded = resolve_heads(str(tmp_path / "a.safetensors"), model)
    assert loaded is not None and loaded.count == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "a.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_identity_survives_a_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_heads(random_heads("linear"), path, base_of(tiny()))
    assert load_heads(path, cast(dtype)).dtype == dtype


def test_wrong_base_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_heads(random_heads("linear"), path, base_of(tiny(), "first-model"))
    with pytest.raises(InputError, match="first-model.*llama.*differ"):
        load_heads(path, tiny(seed=5))
    with pytest.raises(InputError, match=r"hidden size 16.*hidden size 32"):
        load_heads(path, tiny(width=32))
    with pytest.raises(InputError, match="hidden size 16, the model has 32"):
        resolve_heads(random_heads("linear"), tiny(width=32))


def test_none_and_auto() -> None:
    assert resolve_heads("none", tiny()) is None
    assert resolve_heads(None, tiny()) is None
    assert resolve_heads("auto", tiny()) is None
    assert packaged_heads(tiny()) is None


def damaged(path: Path, change: str) -> None:
    tensors = load_file(path)
    heads = {"kind": "linear", "count": 3, "hidden_size": D, "vocab_size": V}
    header: dict[str, object] = {"version": 1, "base": "m", "heads": heads}
    if change == "missing":
        del tensors["heads.layers.1.linear.weight"]
    elif change == "shape":
        tensors["heads.layers.1.linear.weight"] = torch.zeros(D, D + 1)
    elif change == "nan":
        tensors["heads.layers.1.linear.weight"][0, 0] = torch.nan
    elif change == "extra":
        tensors["heads.layers.7.linear.weight"] = torch.zeros(1)
    elif change == "sample":
        del tensors["base.sample"]
    elif change == "version":
        header["version"] = 99
    elif change == "header":
        header["heads"] = {"sort": "linear"}
    elif change == "kind":
        header["heads"] = heads | {"kind": "square"}
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(header)})


@pytest.mark.parametrize(
    "change,message",
    [
        ("missing", "lack tensor layers.1.linear.weight"),
        ("shape", r"has shape \[16, 17\]; \[16, 16\] is needed"),
        ("nan", "not finite"),
        ("extra", "unknown tensor layers.7"),
        ("sample", "lacks tensor base.sample"),
        ("version", "format version 99; known: 1"),
        ("header", "broken header"),
        ("kind", "'square'; valid: linear, conditioned, medusa"),
    ],
)
def test_bad_files_are_one_line_errors(change: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_heads(random_heads("linear"), path, base_of(tiny()), torch.float32)
    damaged(path, change)
    with pytest.raises(InputError, match=message) as caught:
        load_heads(path, tiny())
    assert "\n" not in str(caught.value)


def test_not_a_heads_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_heads(tmp_path / "none.safetensors", tiny())
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(InputError, match="is not a safetensors file"):
        load_heads(tmp_path / "text", tiny())
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="holds no draft heads"):
        load_heads(tmp_path / "other.safetensors", tiny())


def test_writing_fails_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write heads"):
        save_heads(random_heads("linear"), tmp_path / "file" / "a.safetensors", base_of(tiny()))
    broken = random_heads("linear")
    broken.layers[0].linear.weight[0, 0] = torch.nan  # type: ignore[index]
    with pytest.raises(InputError, match="not finite"):
        save_heads(broken, tmp_path / "a.safetensors", base_of(tiny()))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_shipped_heads_are_read_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making an ``LLM`` looks up which heads there are; a file is read at the first use of its kind, once."""
    from tests.conftest import tiny_model
    from tests.lossless.test_tokens import random_heads
    from tokenswift import LLM
    from tokenswift import llm as module

    model, file, read = tiny_model(), tmp_path / "x.heads.safetensors", []
    save_heads(random_heads("medusa", 32, 260), file, base_of(model))
    real = module.read_packaged
    monkeypatch.setattr(module, "packaged_kinds", lambda model: {"medusa": file})
    monkeypatch.setattr(module, "read_packaged", lambda path: read.append(path) or real(path))
    llm = LLM.from_model(model)
    assert read == [] and llm.heads is None and llm.heads_of("conditioned") is None
    first = llm.heads_of("medusa")
    assert first is not None and first is llm.heads_of("medusa") and read == [file]
    assert first.source == "x.heads.safetensors (shipped)"
    assert LLM.from_model(model, heads=None).heads_of("medusa") is None
