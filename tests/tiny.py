"""Tiny random models (float32, fixed seeds) of every family: the one place where tests make
them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from tokenswift.tree import CandidateTree

VOCAB = 97
#: three layers, logits far enough apart for float32 comparisons
SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
#: two layers, for the tokenizer of the fixtures: bytes and four special tokens
BYTES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_QWEN_SLIDING: dict[str, object] = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
}

#: families of the native decoder with Llama's block, some in several forms: model type and config
#: changes
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", _QWEN_SLIDING),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 20}),
}
_WINDOWS: dict[str, object] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16,
    "head_dim": 8,
}
_GEMMA = {**_WINDOWS, "query_pre_attn_scalar": 12}
_LOCAL = {"rope_type": "default", "rope_theta": 500.0}
#: texts of more than so many tokens, prompt included, have the other list of factors
LONGROPE_BORDER = 45
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.0, 6.0],
}
_QUERY_SCALE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.3,
}
#: with the positions of transformers' defaults, for shorter texts
_GPT_OSS: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 16,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
#: and those that set its switches
SWITCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral": ("ministral", _WINDOWS),
    "ministral3": ("ministral3", {"head_dim": 8, "rope_parameters": _QUERY_SCALE}),
    "phi3": ("phi3", {"sliding_window": 20}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": LONGROPE_BORDER,
            "partial_rotary_factor": 0.75,
            "rope_parameters": _LONGROPE,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    "olmo2": ("olmo2", {}),
    "cohere2": ("cohere2", {**_WINDOWS, "logit_scale": 0.5}),
    "olmo3": (
        "olmo3",
        {**_WINDOWS, "rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL}},
    ),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}),
    "gemma3": ("gemma3_text", _GEMMA),
}
#: and those with experts
_EXPERTS: dict[str, object] = {"num_experts_per_tok": 3}
_QWEN_EXPERTS: dict[str, object] = {**_EXPERTS, "num_experts": 8, "moe_intermediate_size": 32}
MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_moe": ("qwen3_moe", {**_QWEN_EXPERTS, "head_dim": 16}),
    "qwen3_moe-renormalised": (
        "qwen3_moe",
        {**_QWEN_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": ("qwen2_moe", {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 40}),
    "olmoe": ("olmoe", {**_EXPERTS, "num_experts": 6}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "granitemoe": (
        "granitemoe",
        {
            **_EXPERTS,
            "num_local_experts": 5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "num_local_experts": 6, **_GPT_OSS}),
}
SWITCHED |= MIXTURES
#: and those with recurrent layers
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 8,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "moe_intermediate_size": 32,
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 16,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
            ],
        },
    ),
}
RECURRENT["qwen3_5_moe"] = (
    "qwen3_5_moe_text",
    {
        **RECURRENT["qwen3_5"][1],
        **_QWEN_EXPERTS,
        "shared_expert_intermediate_size": 40,
        "initializer_range": 0.15,
    },
)
SWITCHED |= RECURRENT
FAMILIES = PLAIN | SWITCHED
BYTE_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def build(
    kind: str, sizes: dict[str, Any], seed: int = 0, attention: str | None = None, **changes: Any
) -> Any:
    """A causal LM of a transformers model type with random weights, float32 whatever its config
    says.

    Args:
        sizes, changes: fields of its config; changes come last.
        attention: "eager", "sdpa" or None (transformers' default).
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **deepcopy({**sizes, **changes}))
    if attention is not None:
        config._attn_implementation = attention
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class(config).eval()
    if kind in {kind for kind, _ in SWITCHED.values()}:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):  # norms, each another one
                parameter.data += 0.3 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer += 0.3 * torch.randn(len(buffer))
    return model


def tiny_model(family: str, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """A tiny random causal LM; the same (family, seed, changes) gives the same weights."""
    kind, extra = FAMILIES[family]
    return build(kind, SIZES, seed, attention, **{"tie_word_embeddings": False, **extra, **changes})


def predictable(model: Any) -> Any:
    """The model, changed: its likeliest next token follows from the last one, mostly, so that its
    texts repeat themselves and leave their ways again and again."""
    embedding = model.model.embed_tokens.weight
    embedding.data *= 10
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(1))
    model.lm_head.weight.data[order] = 0.15 * embedding.data
    return model


def byte_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model of a family with 260 tokens, 2 layers and 256 positions."""
    return build(family, BYTES, seed, **changes)


def add_levels(tree: CandidateTree, levels: Sequence[Sequence[int]]) -> None:
    """One level of candidates after another: every node of a level gets all of the next's."""
    nodes = [0]
    for candidates in levels:
        nodes = [tree.add(node, token) for node in nodes for token in candidates]
