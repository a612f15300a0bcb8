"""Tiny EAGLE-3 drafters with random weights, and their files in the forms that are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenswift.speculation.eagle.config import NAMES as TENSORS
from tokenswift.speculation.eagle.config import EagleConfig, EagleWeights

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
NAMES = {
    name: f"{name}.weight"
    for name in ("fc", "norm", "lm_head", "fc_norm.0", "fc_norm.1", "fc_norm.2")
}
NAMES |= {"embed": "embed_tokens.weight", "features_norm": "input_norm.weight"}
INNER = {
    "input_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
    "post_norm": "post_attention_layernorm",
}
INNER |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
INNER |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def target(**changes: Any) -> Any:
    """The config of a target with 8 layers."""
    fields = {
        "hidden_size": 32,
        "vocab_size": 90,
        "num_hidden_layers": 8,
        "rope_parameters": dict(ROPE),
    }
    return SimpleNamespace(**(fields | {"model_type": "llama"} | changes))


def config(of: Any = None, **changes: Any) -> EagleConfig:
    """A drafter of a target, which says 40 of its tokens."""
    of = of or target()
    fields: dict[str, Any] = {
        "hidden": of.hidden_size,
        "target_hidden": of.hidden_size,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate": 48,
        "eps": 1e-5,
        "rope": ROPE,
        "vocab": of.vocab_size,
        "draft_vocab": 40,
        "feature_layers": (2, of.num_hidden_layers // 2, of.num_hidden_layers - 3),
        "trained": 256,
    }
    return EagleConfig(**(fields | changes))


def ids(of: EagleConfig, seed: int = 3) -> Tensor:
    """The target's ids of the drafter's tokens, rising."""
    tokens = torch.randperm(of.vocab, generator=torch.Generator().manual_seed(seed))
    return tokens[: of.draft_vocab].sort().values


def tensors(of: EagleConfig, seed: int = 1, std: float = 0.2) -> dict[str, Tensor]:
    """Random weights by canonical names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * std + ("norm" in name)
        for name, shape in of.shapes().items()
    }


def weights(of: EagleConfig, seed: int = 1, shared: bool = False, std: float = 0.2) -> EagleWeights:
    """A drafter in memory; ``shared``: without embedding and LM head of its own."""
    by_name = tensors(of, seed, std)
    if shared:
        by_name.pop("embed", None)
        by_name.pop("lm_head", None)
    d2t = None if of.draft_vocab == of.vocab else ids(of)
    return EagleWeights(of, by_name, d2t, "random")


def numbers(of: EagleConfig) -> dict[str, Any]:
    """What a flat config says of the layer."""
    return {
        "model_type": "llama",
        "hidden_size": of.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": of.heads,
        "num_key_value_heads": of.kv_heads,
        "head_dim": of.head_dim,
        "intermediate_size": of.intermediate,
        "rms_norm_eps": of.eps,
        "rope_theta": of.rope["rope_theta"],
        "vocab_size": of.vocab,
        "max_position_embeddings": of.trained,
    }


def write(
    folder: Path,
    of: EagleConfig,
    weights: Mapping[str, Tensor],
    maps: Mapping[str, Tensor] | None = None,
    speculators: bool = False,
    **changes: Any,
) -> Path:
    """Write a folder of either form.

    Args:
        maps: d2t and t2d as they are to lie there.
        changes: fields of its config that win; "absent" leaves one out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layer = "layers.0" if speculators else "midlayer"
    named = {
        f"{layer}.{INNER[name]}.weight"
        if name in INNER
        else NAMES.get(name, name): value.contiguous()
        for name, value in weights.items()
    }
    save_file(named | dict(maps or {}), folder / "model.safetensors")
    flags = ("norm_before_residual", "norm_output")
    fields: dict[str, Any] = {"draft_vocab_size": of.draft_vocab}
    fields |= {name: getattr(of, name) for name in flags}
    fields |= {name: name in of.parts for name in ("norm_before_fc", "fc_norm")}
    layer_fields = numbers(of)
    if speculators:
        if of.window:
            layer_fields |= {"layer_types": ["sliding_attention"], "sliding_window": of.window}
        fields |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
        fields["transformer_layer_config"] = layer_fields
    else:
        fields = {"architectures": ["LlamaForCausalLMEagle3"], **layer_fields, **fields}
    fields |= changes
    present = {name: value for name, value in fields.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(present))
    return folder


def write_gguf(
    path: Path,
    of: EagleConfig,
    weights: Mapping[str, Tensor],
    d2t: Tensor | None,
    kind: str = "eagle3",
    **changes: int,
) -> Path:
    """A GGUF file of an architecture; queries and keys paired as Llama's converter does."""
    writer = gguf.GGUFWriter(path, kind)
    for name, value in {
        "context_length": of.trained,
        "embedding_length": of.hidden,
        "block_count": 1,
        "feed_forward_length": of.intermediate,
        "attention.head_count": of.heads,
        "attention.head_count_kv": of.kv_heads,
        "attention.key_length": of.head_dim,
        "rope.dimension_count": of.head_dim,
        "vocab_size": of.vocab,
        "target_hidden_size": of.target_hidden,
        **changes,
    }.items():
        writer.add_uint32(f"eagle3.{name}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", of.eps)
    base = of.rope["rope_theta"]
    assert isinstance(base, float)
    writer.add_float32("eagle3.rope.freq_base", base)
    writer.add_bool("eagle3.norm_before_residual", of.norm_before_residual)
    writer.add_array("eagle3.target_layers", list(of.feature_layers))
    writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(of.vocab)])
    heads = {"q": of.heads, "k": of.kv_heads}
    for name, value in weights.items():
        if name in heads:
            value = value.unflatten(0, (heads[name], 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(TENSORS[name][1], value.contiguous().numpy().astype(np.float32))
    if d2t is not None:
        writer.add_tensor("d2t", d2t.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
