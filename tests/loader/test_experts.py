"""Mixtures of experts in folders: what a config says of them, and tensors under all their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import tiny_tokenizer
from tests.tiny import MIXTURES, SIZES, tiny_model
from tokenswift import LLM
from tokenswift.kernels.weights import Mixture
from tokenswift.loader.config import completed
from tokenswift.loader.layout import layout_of
from tokenswift.loader.schema import check_numbers
from tokenswift.models.decoder import NativeTarget
from tokenswift.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")

#: a config as the hub has it, its head's width and its experts aside
STATED: dict[str, object] = {**SIZES, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
EXPERTS: dict[str, object] = {"num_experts": 8, "num_experts_per_tok": 3}
QWEN: dict[str, object] = {**EXPERTS, "moe_intermediate_size": 32}


def mixture_of(kind: str, **fields: object) -> Mixture | None:
    """What a config says of experts; None: it is left to transformers."""
    config = completed(kind, {**STATED, **fields})
    return None if config is None else layout_of(config).mixture


@pytest.mark.parametrize(
    ("kind", "fields", "renormalised"),
    [
        ("qwen3_moe", QWEN, False),
        ("qwen3_moe", {**QWEN, "norm_topk_prob": True}, True),
        ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 40}, False),
        ("olmoe", EXPERTS, False),
        ("olmoe", {**EXPERTS, "norm_topk_prob": True}, True),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
        ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
    ],
)
def test_scores_are_renormalised_as_config_or_family_say(
    kind: str, fields: dict[str, object], renormalised: bool
) -> None:
    mixture = mixture_of(kind, **fields)
    assert mixture is not None
    assert mixture.renormalised is renormalised


def test_the_number_of_experts_is_read_by_either_name() -> None:
    fields = {**QWEN, "num_local_experts": 8}
    del fields["num_experts"]
    assert mixture_of("qwen3_moe", **fields) == mixture_of("qwen3_moe", **QWEN)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("olmoe", {**EXPERTS, "clip_qkv": 8.0}),
        ("qwen3_moe", {**QWEN, "use_sliding_window": True}),
        ("qwen3_moe", {"num_experts_per_tok": 3, "moe_intermediate_size": 32}),
        ("qwen3_moe", {**QWEN, "router_of_another_kind": True}),
    ],
)
def test_configs_that_mean_something_else_are_left_to_transformers(
    kind: str, fields: dict[str, object]
) -> None:
    assert mixture_of(kind, **fields) is None


def test_layers_without_experts_are_those_that_a_config_names() -> None:
    config = completed("qwen3_moe", {**STATED, **QWEN, "mlp_only_layers": [0]})
    assert config is not None
    assert layout_of(config).dense_layers == (0,)
    config = completed("qwen3_moe", {**STATED, **QWEN, "decoder_sparse_step": 2})
    assert config is not None
    assert layout_of(config).dense_layers == (0, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok is 9; valid: up to 8"),
        ({**EXPERTS, "num_experts": 0}, "num_experts is 0"),
        ({**EXPERTS, "num_experts": 1 << 40}, "num_experts is 1"),
        ({**EXPERTS, "num_experts": 4096, "num_hidden_layers": 512}, "num_experts is 4"),
        ({**EXPERTS, "moe_intermediate_size": -2}, "moe_intermediate_size is -2"),
        ({**EXPERTS, "mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
    ],
)
def test_numbers_that_no_mixture_has_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_numbers({**STATED, **fields}, "config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(family)`` → a checkpoint with the parameters of transformers' model as they are, all
    experts in one tensor."""

    def make(family: str, **fields: Any) -> Path:
        model = tiny_model(family)
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        weights = {name: values.contiguous() for name, values in model.state_dict().items()}
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        return tmp_path

    return make


@pytest.mark.parametrize("family", MIXTURES)
def test_tensors_of_all_experts_are_those_of_each(family: str, folder: Callable[..., Path]) -> None:
    target = LLM(folder(family), dtype="float32", device="cpu", heads="none").target
    assert isinstance(target, NativeTarget)
    expected = LLM.from_model(tiny_model(family), heads="none").target
    tokens = torch.arange(2, 40)
    states = [
        each.forward(tokens, torch.arange(len(tokens)), each.new_cache(len(tokens))).hidden
        for each in (target, expected)
    ]
    assert torch.equal(states[0], states[1])


def test_a_tensor_of_other_experts_than_the_config_says_is_refused(
    folder: Callable[..., Path],
) -> None:
    path = folder("qwen3_moe", num_local_experts=7)
    with pytest.raises(InputError, match=r"down_proj is \(8, 48, 32\) in F32; valid: \(7, 48, 32"):
        LLM(path, device="cpu", heads="none")
