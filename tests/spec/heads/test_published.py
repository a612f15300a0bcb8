"""Published checkpoints: import, base check, export, faults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import tiny_model
from tokenswift.loader.identity import base_of
from tokenswift.spec.heads.checkpoint import load_heads, save_heads
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.spec.heads.published import checkpoint_folder, export_checkpoint, import_checkpoint
from tokenswift.spec.heads.resolve import resolve_heads
from tokenswift.types import InputError

D, V = 32, 260


def published(folder: Path, form: str = "safetensors", seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """A checkpoint in the published layout, written without this library's export."""
    model = tiny_model(seed=seed)
    torch.manual_seed(9)
    extra = {}
    for i in range(3):
        extra[f"model.medusa_layers.{i}.linear.weight"] = torch.randn(D, D) * 0.2
        extra[f"model.medusa_layers.{i}.input_layernorm.weight"] = torch.rand(D) + 0.5
        extra[f"model.medusa_layers.{i}.post_layernorm.weight"] = torch.rand(D) + 0.5
    weights = {k: v.clone() for k, v in model.state_dict().items()} | extra
    folder.mkdir()
    names = sorted(weights)
    halves = (names[::2], names[1::2])
    if form == "safetensors":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        suffix = "safetensors" if form == "sharded" else "bin"
        stem = "model" if form == "sharded" else "pytorch_model"
        where = {}
        for n, half in enumerate(halves):
            file = f"{stem}-0000{n + 1}-of-00002.{suffix}"
            shard = {k: weights[k] for k in half}
            if form == "sharded":
                save_file(shard, folder / file, metadata={"format": "pt"})
            else:
                torch.save(shard, folder / file)
            where |= dict.fromkeys(half, file)
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": where}))
    config = model.config.to_dict() | {"medusa_heads": 3, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model, extra


def by_definition(model: Any, extra: dict[str, torch.Tensor], hidden: torch.Tensor) -> list[torch.Tensor]:
    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()

    logits, state = [], hidden
    for i in range(3):
        w = {k.partition(f"{i}.")[2]: v for k, v in extra.items() if f"layers.{i}." in k}
        state = state + rms(state, w["input_layernorm.weight"]) @ w["linear.weight"].T
        logits.append(model.lm_head(rms(state, w["post_layernorm.weight"])))
    return logits


def by_heads(model: Any, heads: Heads, hidden: torch.Tensor) -> list[torch.Tensor]:
    logits, state = [], hidden
    for i in range(heads.count):
        state = heads.advance(i, state, hidden, None)
        logits.append(model.lm_head(heads.normed(i, state)))
    return logits


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded", "sharded-bin"])
@torch.no_grad()
def test_imported_heads_give_the_logits_of_the_definition(form: str, tmp_path: Path) -> None:
    model, extra = published(tmp_path / "c", form)
    heads, base = import_checkpoint(tmp_path / "c", model)
    hidden = torch.randn(6, D)
    for mine, want in zip(by_heads(model, heads, hidden), by_definition(model, extra, hidden), strict=True):
        torch.testing.assert_close(mine, want)
    save_heads(heads, tmp_path / "h.safetensors", base, torch.float32)
    again = load_heads(tmp_path / "h.safetensors", model)
    torch.testing.assert_close(by_heads(model, again, hidden), by_heads(model, heads, hidden))


def test_the_folder_itself_as_model_brings_its_heads(tmp_path: Path) -> None:
    published(tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    heads = resolve_heads("auto", model)
    assert heads is not None and heads.kind == "linear" and heads.count == 3


def test_wrong_base_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "c")
    with pytest.raises(InputError, match="weights differ"):
        import_checkpoint(tmp_path / "c", tiny_model(seed=4))


@torch.no_grad()
def test_export_comes_back(tmp_path: Path) -> None:
    model, extra = published(tmp_path / "c")
    heads, _ = import_checkpoint(tmp_path / "c")
    export_checkpoint(heads, model, tmp_path / "e")
    written = load_file(tmp_path / "e" / "model.safetensors")
    for name, tensor in extra.items():
        assert torch.equal(written[name], tensor)
    again, base = import_checkpoint(tmp_path / "e", model)
    assert base.distance(base_of(model)) == 0
    hidden = torch.randn(4, D)
    torch.testing.assert_close(by_heads(model, again, hidden), by_heads(model, heads, hidden))
    with pytest.raises(InputError, match="not empty"):
        export_checkpoint(heads, model, tmp_path / "e")
    conditioned = Heads(HeadsConfig("conditioned", 3, D, V, 8))
    with pytest.raises(InputError, match="linear heads only"):
        export_checkpoint(conditioned, model, tmp_path / "f")


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@torch.no_grad()
def test_medusa_heads(prefix: str, tmp_path: Path) -> None:
    model = tiny_model()
    torch.manual_seed(3)
    raw = {}
    for i in range(2):
        raw[f"{prefix}{i}.0.linear.weight"] = torch.randn(D, D) * 0.2
        raw[f"{prefix}{i}.0.linear.bias"] = torch.randn(D) * 0.2
        raw[f"{prefix}{i}.1.weight"] = torch.randn(V, D) * 0.2
    (tmp_path / "m").mkdir()
    torch.save(raw, tmp_path / "m" / "medusa_lm_head.pt")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    with pytest.raises(InputError, match="--model"):
        import_checkpoint(tmp_path / "m")
    heads, base = import_checkpoint(tmp_path / "m", model)
    assert heads.kind == "medusa" and heads.count == 2 and heads.own_lm_heads
    hidden = torch.randn(5, D)
    state = model.model.norm(hidden)
    for i in range(2):
        block = state @ raw[f"{prefix}{i}.0.linear.weight"].T + raw[f"{prefix}{i}.0.linear.bias"]
        want = (state + torch.nn.functional.silu(block)) @ raw[f"{prefix}{i}.1.weight"].T
        mine = heads.own_logits(i, heads.normed(i, heads.advance(i, hidden, hidden, None)))
        torch.testing.assert_close(mine, want)
    save_heads(heads, tmp_path / "m.safetensors", base)
    assert load_heads(tmp_path / "m.safetensors", model).own_lm_heads


def broken(folder: Path, change: str) -> None:
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    name = "model.medusa_layers.1.linear.weight"
    if change == "shape":
        weights[name] = torch.zeros(D, D + 1)
    elif change == "tensor":
        del weights[name]
    elif change == "heads":
        weights = {k: v for k, v in weights.items() if "medusa" not in k}
    elif change == "count":
        config["medusa_heads"] = 5
    elif change == "nan":
        weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change,message",
    [
        ("shape", "has shape"),
        ("tensor", "lack tensor layers.1.linear.weight"),
        ("heads", "has no heads"),
        ("count", "has 3 heads, its config says medusa_heads 5"),
        ("nan", "not finite"),
    ],
)
def test_faults_are_one_line_errors(change: str, message: str, tmp_path: Path) -> None:
    published(tmp_path / "c")
    broken(tmp_path / "c", change)
    with pytest.raises(InputError, match=message) as caught:
        import_checkpoint(tmp_path / "c")
    assert "\n" not in str(caught.value)


EMBEDDING, WEIGHT = "model.embed_tokens.weight", "model.medusa_layers.1.linear.weight"
STRANGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "layers of a text": ({"num_hidden_layers": "x"}, {}, "num_hidden_layers is 'x'; valid: an integer"),
    "infinite layers": ({"num_hidden_layers": float("inf")}, {}, "num_hidden_layers is inf; valid: "),
    "heads of a list": ({"medusa_heads": []}, {}, r"medusa_heads is \[\]; valid: an integer"),
    "eps of a text": ({"rms_norm_eps": "x"}, {}, "heads' eps is 'x'; valid: 0 to 1"),
    "infinite eps": ({"rms_norm_eps": float("inf")}, {}, "heads' eps is inf; valid: 0 to 1"),
    "an embedding of one dimension": ({}, {EMBEDDING: torch.zeros(9)}, r"has shape \[9\]; valid: a matrix"),
    "an empty embedding": ({}, {EMBEDDING: torch.zeros(0, D)}, "is not a tensor of float32"),
    "whole numbers": ({}, {WEIGHT: torch.zeros(D, D, dtype=torch.int64)}, "is not a tensor of float32"),
    "eight bits": ({}, {WEIGHT: torch.zeros(D, D).to(torch.float8_e4m3fn)}, "is not a tensor of float32"),
    "sparse numbers": ({}, {WEIGHT: torch.eye(D).to_sparse()}, "is not a tensor of float32"),
    "no tensor": ({}, {WEIGHT: 5}, "is not a tensor of float32"),
    "a single number": ({}, {"model.medusa_layers.0.input_layernorm.weight": torch.tensor(1.0)}, "has shape"),
    "many heads": (
        {"medusa_heads": 10**6},
        {"model.medusa_layers.999999.linear.weight": torch.zeros(1)},
        "tensors, too few for 1000000 heads",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_checkpoints_of_strangers_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    said, tensors, words = STRANGE[name]
    published(tmp_path / "c", "bin")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps(config | said))
    weights = torch.load(tmp_path / "c" / "pytorch_model.bin", weights_only=True)
    torch.save(weights | tensors, tmp_path / "c" / "pytorch_model.bin")
    with pytest.raises(InputError, match=words) as caught:
        import_checkpoint(tmp_path / "c")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_heads_without_a_number(tmp_path: Path) -> None:
    published(tmp_path / "c", "bin")
    weights = torch.load(tmp_path / "c" / "pytorch_model.bin", weights_only=True)
    numbered = {name.replace("layers.1.linear", "layers.x.linear"): t for name, t in weights.items()}
    torch.save(numbered, tmp_path / "c" / "pytorch_model.bin")
    with pytest.raises(InputError, match="lack tensor layers.1.linear.weight"):
        import_checkpoint(tmp_path / "c")


def test_medusa_heads_of_strangers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": "x"}')
    torch.save({"0.0.linear.weight": torch.zeros(D, D)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InputError, match="medusa_num_heads is 'x'; valid: an integer"):
        import_checkpoint(tmp_path, tiny_model())


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        import_checkpoint(tmp_path / "none")
    with pytest.raises(InputError, match=r"no config\.json"):
        import_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no safetensors or bin"):
        import_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_text("rubbish")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        import_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.embed_tokens.weight": "gone.bin"}})
    )
    with pytest.raises(InputError, match=r"lacks the shard gone\.bin"):
        import_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"model.embed_tokens.weight": "../../model.bin"}, "names the file '../../model.bin'; valid: "),
        ({"model.embed_tokens.weight": "/dev/zero"}, "names the file '/dev/zero'; valid: safetensors or bin"),
        ({"model.embed_tokens.weight": 5}, "names the file 5; valid: "),
        ({}, "weight_map of model.safetensors.index.json is {}; valid: "),
        ([], "weight_map of model.safetensors.index.json is []; valid: "),
        (None, "weight_map of model.safetensors.index.json is None; valid: "),
    ],
)
def test_an_index_names_files_of_its_folder(said: object, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": said}))
    with pytest.raises(InputError, match=re.escape(words)):
        import_checkpoint(tmp_path)


class Hub:
    """Stands in for the hub: gives the files of a folder that match, and counts them."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache, self.given = source, cache, set[str]()

    def snapshot_download(self, name: str, allow_patterns: list[str]) -> str:
        if name != "owner/heads":
            raise OSError(f"no repository {name}")
        self.cache.mkdir(exist_ok=True)
        for file in self.source.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                self.given.add(file.name)
                (self.cache / file.name).write_bytes(file.read_bytes())
        return str(self.cache)


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded"])
@torch.no_grad()
def test_heads_by_hub_id(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, extra = published(tmp_path / "c", form)
    if form == "sharded":  # a third shard, with nothing that is wanted
        index = tmp_path / "c" / "model.safetensors.index.json"
        where = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"weight_map": where | {"model.layers.9.x": "model-00003.safetensors"}}))
        (tmp_path / "c" / "model-00003.safetensors").write_bytes(b"never fetched")
    hub = Hub(tmp_path / "c", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    heads, base = import_checkpoint(checkpoint_folder("owner/heads"), model)
    hidden = torch.randn(6, D)
    for mine, want in zip(by_heads(model, heads, hidden), by_definition(model, extra, hidden), strict=True):
        torch.testing.assert_close(mine, want)
    assert "model-00003.safetensors" not in hub.given
    with pytest.raises(InputError, match="owner/none is not a folder here.*no repository owner/none") as told:
        checkpoint_folder("owner/none")
    assert "\n" not in str(told.value)


def test_a_model_by_hub_id_brings_its_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    model.config._name_or_path = "owner/heads"
    cached = {"owner/heads": str(tmp_path / "c" / "config.json")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: cached.get(name))
    heads = resolve_heads("auto", model)
    assert heads is not None and heads.kind == "linear" and heads.count == 3
    model.config._name_or_path = "owner/other"
    assert resolve_heads("auto", model) is None
