"""Mixtures of experts in GGUF files: the same logits as the tensors that they were written from,
and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gguf_files import QuantType, small, write
from tests.loader.test_gguf import GREEDY, MIXES, PROMPT, far, lean_logits, logits, opened
from tokenswift import LLM
from tokenswift.kernels.weights import Mixture
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.source import FromFiles
from tokenswift.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")

QWEN: dict[str, object] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**QWEN, "norm_topk_prob": True},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 256},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 4},
    "granitemoe": {
        "num_local_experts": 4,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "lfm2_moe": {
        **QWEN,
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "qwen3_5_moe_text": {
        **QWEN,
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 7.0,
    },
}


#: with experts as gpt-oss's files have them
WITH_MXFP4 = {**MIXES, "mxfp4": {"": QuantType.Q8_0, "exps": QuantType.MXFP4}}


def written(path: Path, kind: str, mix: str = "f32", **options: Any) -> Any:
    """The model of a family's file."""
    return write(path, small(kind, **CHANGES[kind]), WITH_MXFP4[mix], **options)


def mixture_of(path: Path) -> Mixture:
    """The mixture that a file says."""
    layout = opened(path).target.layout
    assert layout is not None
    assert layout.mixture is not None
    return layout.mixture


@pytest.mark.parametrize(
    ("kind", "mix"),
    [
        *(("qwen3_moe", mix) for mix in MIXES),
        *((kind, "q4_k_m") for kind in CHANGES),
        *(("gpt_oss", mix) for mix in ("f32", "f16", "bf16", "mxfp4")),
    ],
)
def test_logits_are_those_of_the_tensors(kind: str, mix: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = written(path, kind, mix)
    llm = opened(path)
    assert isinstance(llm.source, FromFiles)
    expected = logits(model)
    assert far(lean_logits(llm), expected) < 1e-5
    rounding = 1e-6 if kind == "qwen3_5_moe_text" else 0  # of its files' decays
    assert far(logits(llm.model), expected) <= rounding
    text = llm.generate(PROMPT, 12, sampling=GREEDY, ignore_eos=True).token_ids
    wrapped = LLM.from_model(model, heads="none")
    assert wrapped.generate(PROMPT, 12, sampling=GREEDY, ignore_eos=True).token_ids == text


@pytest.mark.parametrize("mix", ["f32", "q4_k_m"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text"])
def test_gate_and_up_may_be_one_tensor(kind: str, mix: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = written(path, kind, mix, joint=True)
    llm = opened(path)
    assert isinstance(llm.source, FromFiles)
    expected = logits(model)
    assert far(lean_logits(llm), expected) < 1e-5
    assert far(logits(llm.model), expected) < 1e-6


def test_quantized_experts_are_multiplied_as_integers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "qwen3_moe", "q4_k_m")
    llm = LLM(path, device="cpu", heads="none")
    assert llm.target.int8
    assert len(llm.generate(PROMPT, 12, sampling=GREEDY, ignore_eos=True).token_ids) == 12


def test_the_router_stays_float_where_weights_are_quantized(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "olmoe")
    llm = opened(path, weights="q8_0")
    assert isinstance(llm.target, NativeTarget)
    experts = llm.target.body.weights[0].experts
    assert experts is not None
    assert experts.router.data.dtype == torch.float32
    assert all(weight.stored for weight in experts.packed())


@pytest.mark.parametrize(
    ("kind", "renormalised"), [("qwen3_moe", True), ("qwen2_moe", False), ("olmoe", False)]
)
def test_scores_are_renormalised_as_the_family_does_where_a_file_does_not_say(
    kind: str, renormalised: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    written(path, kind)
    assert mixture_of(path).renormalised is renormalised


def test_a_file_says_whether_scores_are_renormalised(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "olmoe", fields={"olmoe.expert_weights_norm": True})
    assert mixture_of(path).renormalised


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "more used than there are": (
        {"qwen3moe.expert_used_count": 6},
        "qwen3moe.expert_used_count is 6; valid: up to 5, the number of experts",
    ),
    "another number": (
        {"qwen3moe.expert_count": 4},
        r"tensor blk.0.ffn_gate_exps.weight is \(5, 256, 256\) in F32; valid: \(4, 256, 256\)",
    ),
    "another width": (
        {"qwen3moe.expert_feed_forward_length": 128},
        r"tensor blk.0.ffn_gate_exps.weight is \(5, 256, 256\) in F32; valid: \(5, 128, 256\)",
    ),
    "an odd width": (
        {"qwen3moe.expert_feed_forward_length": 127},
        "qwen3moe.expert_feed_forward_length is 127; valid: an even number",
    ),
    "very many": ({"qwen3moe.expert_count": 1 << 30}, "qwen3moe.expert_count is 1,?073"),
    "a scale": (
        {"qwen3moe.expert_weights_scale": 2.5},
        "qwen3moe.expert_weights_scale is 2.5; valid: 1, or a file without it",
    ),
    "another function": (
        {"qwen3moe.expert_gating_func": 2},
        "qwen3moe.expert_gating_func is 2; valid: 1, or a file without it",
    ),
    "groups": ({"qwen3moe.expert_group_count": 2}, "qwen3moe.expert_group_count is 2; valid: 1"),
    "no truth": (
        {"qwen3moe.expert_weights_norm": 1},
        "qwen3moe.expert_weights_norm is 1; valid: true, false",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_say_what_cannot_be_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    fields, message = REFUSED[name]
    path = tmp_path / "model.gguf"
    written(path, "qwen3_moe", fields=fields)
    with pytest.raises(InputError, match=message) as raised:
        opened(path)
    assert "\n" not in str(raised.value)


def test_an_expert_is_read_from_its_place(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = written(path, "qwen3_moe")
    source = opened(path).source
    for expert in (0, 3, 4):
        both = model.model.layers[1].mlp.experts.gate_up_proj[expert]
        up = source.weight(f"model.layers.1.mlp.experts.{expert}.up_proj.weight")
        assert isinstance(up, torch.Tensor)
        assert torch.equal(up, both[256:])
