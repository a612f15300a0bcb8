"""Tiny random models of every supported family (float32, fixed seeds)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
_COMMON: dict[str, Any] = {
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
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # logits far enough apart for float32 comparisons
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
_QWEN_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _YARN}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-sliding": (Qwen2Config, Qwen2ForCausalLM, _QWEN_SLIDING),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-sliding": (MistralConfig, MistralForCausalLM, {"sliding_window": 20}),
}


def tiny_model(family: str, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """A tiny random causal LM; the same (family, seed, changes) gives the same weights."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**{**_COMMON, **extra, **changes})
    config._attn_implementation = attention
    return model_class(config).eval()
