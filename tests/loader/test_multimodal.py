"""Text models within models of text and pictures, as Mistral's files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from tests.conftest import tiny_tokenizer
from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.loader.load import load
from tokenswift.models.source import FromFiles
from tokenswift.types import InputError

IDS = torch.randint(2, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
#: what a wrapper's files call the weights of its text model
NAMINGS = {
    "published": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "saved": {"model.": "model.language_model.", "lm_head.": "lm_head."},
}
WRAPPER: dict[str, object] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "dtype": "float32",
    "vision_config": {"model_type": "pixtral", "hidden_size": 16},
}

pytestmark = pytest.mark.usefixtures("own_cache")


def wrap(folder: Path, naming: str, kind: str = "ministral3", **fields: object) -> Any:
    """Save a tiny text model as a wrapper's; returns the text model."""
    model = tiny_model(kind, vocab_size=260, tie_word_embeddings=naming == "saved")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    inner = json.loads((folder / "config.json").read_text())
    config = {**WRAPPER, "text_config": inner, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"vision_tower.patch_conv.weight": torch.zeros(2, 2)}
    for name, weight in load_file(folder / "model.safetensors").items():
        before = next(part for part in NAMINGS[naming] if name.startswith(part))
        weights[NAMINGS[naming][before] + name.removeprefix(before)] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def opened(folder: Path) -> LLM:
    return LLM(folder, device="cpu", heads="none")


def logits(llm: LLM) -> torch.Tensor:
    cache = llm.target.new_cache(len(IDS))
    return llm.target.logits(llm.target.prefill(IDS, cache).hidden)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b[-len(a) :]).norm() / b[-len(a) :].norm())


@torch.inference_mode()
def expected(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", ["ministral3", "mistral"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_the_text_model_runs_natively(naming: str, kind: str, tmp_path: Path) -> None:
    model = wrap(tmp_path, naming, kind)
    llm = opened(tmp_path)
    assert isinstance(llm.source, FromFiles)
    assert far(logits(llm), expected(model)) < 1e-5


def test_transformers_own_model_is_the_text_model(tmp_path: Path) -> None:
    """As the audit compares with."""
    model = wrap(tmp_path, "published")
    assert far(expected(opened(tmp_path).model), expected(model)) < 1e-5
    assert far(expected(load(tmp_path, device="cpu").model), expected(model)) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_what_transformers_saves_of_a_whole_model(tmp_path: Path) -> None:
    text = tiny_model("ministral3", vocab_size=260).config.to_dict()
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Mistral3Config(text_config=text, vision_config=vision)
    config.tie_word_embeddings = False
    model = Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    llm = opened(tmp_path)
    assert isinstance(llm.source, FromFiles)
    assert far(logits(llm), expected(model)) < 1e-5


def test_weights_in_eight_bits_are_refused_in_a_line(tmp_path: Path) -> None:
    wrap(tmp_path, "published", quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match="is quantized by fp8; valid: the checkpoint that it was"):
        opened(tmp_path)


def test_a_text_model_of_no_native_family_is_refused_in_a_line(tmp_path: Path) -> None:
    wrap(tmp_path, "published")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "gpt2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="one of text and pictures, whose text model cannot be"):
        opened(tmp_path)
