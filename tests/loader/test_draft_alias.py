"""The default model's draft model: layers of its own; embedding, LM head and tokenizer are that model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.gguf_files import small, write
from tokenswift.loader import default_model
from tokenswift.loader.load import load


def test_the_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    write(tmp_path / "cache" / default_model.GGUF, small(tie_word_embeddings=True))
    monkeypatch.setattr(default_model, "RIVALS", tmp_path)
    monkeypatch.setattr(default_model, "ensure", lambda cache, on_progress=None: tmp_path / "cache")
    target = load(tmp_path / "cache", device="cpu")
    given = target.model.state_dict()
    config = target.model.config.to_diff_dict() | {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLM"],
    }
    own = {name: torch.randn_like(value).bfloat16() for name, value in given.items() if ".layers.0." in name}
    own["model.norm.weight"] = torch.rand_like(given["model.norm.weight"]).bfloat16()
    said = json.dumps({"config": config})
    packed = tmp_path / f"{default_model.NAME}.draft.safetensors"
    save_file(own, packed, metadata={default_model.METADATA_KEY: said})
    loaded = load(default_model.DRAFT, device="cpu")
    assert loaded.name == "smollm2-135m-draft" and len(loaded.model.model.layers) == 1
    assert loaded.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    made = loaded.model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(made[name], given[name])
    assert all(torch.equal(made[name], value.float()) for name, value in own.items())
