"""The layer with which a model's own files draft (MTP): its drafts are those of a plain reference,
and change no token."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from tests.gguf_files import write
from tests.speculation.eagle.mtp_reference import (
    SIZES,
    TEXT,
    Reference,
    differ,
    drafts,
    folder_with,
    opened,
    reference_drafts,
)
from tests.tiny import BYTES, build
from tokenswift import LLM, SamplingParams
from tokenswift.loader.drafting import GGUF_NAMES, LAYER
from tokenswift.models.packing import Packing

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model() -> Qwen3_5ForCausalLM:
    return build("qwen3_5_text", {**BYTES, **SIZES})


@pytest.fixture(scope="module")
def reference(model: Qwen3_5ForCausalLM) -> Reference:
    return Reference(model)


def test_its_drafts_are_those_of_the_reference(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    llm, drafter = opened(folder_with(tmp_path, model, reference.state_dict()))
    expected = reference_drafts(model, reference, TEXT, 4)
    assert differ(drafts(drafter, drafter.target, TEXT, 4), expected) == [False] * 4


def test_a_second_draft_from_a_state_without_its_norm_is_seen(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, drafter = opened(folder_with(tmp_path, model, reference.state_dict()))
    monkeypatch.setattr(drafter, "fed_back", drafter._entering)
    expected = reference_drafts(model, reference, TEXT, 2)
    assert differ(drafts(drafter, drafter.target, TEXT, 2), expected) == [False, True]


def test_norms_that_get_their_1_twice_are_seen(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_with(tmp_path, model, reference.state_dict())
    once = Packing.norm_weight

    def twice(self: Packing, name: str) -> Tensor:
        return once(self, name) + name.startswith("mtp.")

    monkeypatch.setattr(Packing, "norm_weight", twice)
    llm, drafter = opened(path)
    expected = reference_drafts(model, reference, TEXT, 1)
    assert differ(drafts(drafter, drafter.target, TEXT, 1), expected) == [True]


def test_it_drafts_under_auto_and_changes_no_token(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    path = folder_with(tmp_path, model, reference.state_dict())
    llm, _ = opened(path)
    for sampling in (SamplingParams(seed=3), SamplingParams(greedy=True, repetition_penalty=1.0)):
        generate = partial(llm.generate, TEXT, 80, sampling=sampling, ignore_eos=True)
        plain = generate("autoregressive")
        drafted = generate("auto")
        assert drafted.token_ids == plain.token_ids
    without = LLM(path, dtype="float32", heads="none", eagle="none")
    assert without.resources.eagle is None
    greedy = without.generate(TEXT, 80, sampling=sampling, ignore_eos=True)
    assert greedy.token_ids == plain.token_ids


def test_a_layer_of_another_kind_is_left_out_with_a_warning(
    model: Qwen3_5ForCausalLM,
    reference: Reference,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = {**reference.state_dict(), "embed_tokens.weight": torch.zeros(260, 32)}
    path = folder_with(tmp_path, model, tensors)
    with caplog.at_level(logging.WARNING, logger="tokenswift"):
        assert LLM(path, dtype="float32", heads="none").resources.eagle is None
    assert "a layer that drafts, of a kind that does not run here" in caplog.text


def test_a_gguf_file_brings_it_too(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    names = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
    }
    names |= {f"{LAYER}{ours}.weight": f"{theirs}.weight" for ours, theirs in parts.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in reference.state_dict().items():
        tensors[f"blk.4.{names[f'mtp.{name}']}"] = tensor + 1 if tensor.ndim == 1 else tensor
    fields = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = tmp_path / "model.gguf"
    write(path, deepcopy(model), fields=fields, more=tensors)
    llm, drafter = opened(path)
    expected = reference_drafts(model, reference, TEXT, 3)
    assert differ(drafts(drafter, drafter.target, TEXT, 3), expected) == [False] * 3
