"""Loading: every way to name a model, and every way in which it fails, one line each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig

from tests.conftest import tiny_tokenizer
from tests.gguf_files import small, write
from tokenswift import LLM
from tokenswift.loader.load import load
from tokenswift.types import InputError

Folder = Callable[..., Path]


def refused(name: object, *words: str, **options: Any) -> None:
    with pytest.raises(InputError) as caught:
        load(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_bad_names(tmp_path: Path) -> None:
    refused("gpt-nine", "'gpt-nine'", "smollm2-135m", "folder", "hub id")
    refused("", "''", "smollm2-135m")
    refused(tmp_path / "absent", "absent", "no such folder")
    refused("../x/y", "no such folder")
    refused(tmp_path, "has no config.json; valid: a folder with one, or with a GGUF file")
    (tmp_path / "file.gguf").write_text("x")
    refused(tmp_path / "file.gguf", "is not a complete GGUF file (it does not begin with GGUF)")
    (tmp_path / "file.bin").write_text("")
    refused(tmp_path / "file.bin", "is a file, but not a GGUF file")


def test_a_config_of_another_kind_of_model(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused(tmp_path, "weights do not fit its config.json, which asks for")


@pytest.mark.parametrize(
    "architectures",
    [
        ["LlamaForSequenceClassification"],
        ["LlamaModel"],
        ["LlamaForCausalLM", "LlamaForTokenClassification"],
        5,
        {"LlamaForCausalLM": 1},
    ],
)
def test_only_causal_language_models_are_run(architectures: object, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    refused(
        copy,
        f"is not a causal language model (its architectures are {str(architectures)[:30]}",
        "; valid: causal language models with rotary positions, such as Llama, Qwen or Mistral",
    )


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [], None])
def test_configs_of_causal_language_models_are_run(architectures: object, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    assert load(copy, device="cpu").model.config.model_type == "llama"


@pytest.mark.parametrize("content", ["{", '{"model_type": "nonesuch"}', "{}"])
def test_unusable_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "config.json")


@pytest.fixture
def copy(tiny_folder: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(), tmp_path / "copy"))


def test_damaged_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(copy, "weights cannot be loaded")
    weights.unlink()
    refused(copy, "weights cannot be loaded")


def test_folders_without_a_tokenizer(tiny_folder: Folder, tmp_path: Path) -> None:
    """transformers has one without words for them."""
    folder = Path(shutil.copytree(tiny_folder("qwen2"), tmp_path / "copy"))
    (folder / "tokenizer.json").unlink()
    refused(folder, "has no tokenizer files; valid: with tokenizer.json")


@pytest.mark.model
def test_default_model(embedded: str) -> None:
    loaded = load("smollm2-135m", device="cpu")
    assert loaded.name == "smollm2-135m"
    assert loaded.model.dtype == torch.float32
    assert (
        loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
    )
    digits = [216, 34, 32, 34, 36]
    assert loaded.tokenizer("In 2024")["input_ids"] == [
        *loaded.tokenizer("In")["input_ids"],
        *digits,
    ]
    assert loaded.tokenizer.eos_token_id == 2
    assert loaded.model.generation_config.eos_token_id == [
        0,
        2,
    ]


# ---- torch's default type, which is the whole process's ----


@pytest.fixture
def default_types(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """What torch's default type was set to."""
    default_types: list[torch.dtype] = []
    real = torch.set_default_dtype

    def set_default_dtype(dtype: torch.dtype) -> None:
        default_types.append(dtype)
        real(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", set_default_dtype)
    return default_types


def test_a_model_beside_running_texts(tmp_path: Path, default_types: list[torch.dtype]) -> None:
    """Where transformers' own model is asked for behind one that is read from its file."""
    write(tmp_path / "model.gguf", small())
    with LLM(tmp_path / "model.gguf", dtype="bfloat16", device="cpu", heads="none") as llm:
        model = llm.source.model
    assert set(default_types) <= {torch.float32}  # the usual one
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16
    assert {part.dtype for part in model.buffers()} == {torch.float32}  # tables of positions
