"""Families whose layers have one MLP."""

from __future__ import annotations

from tokenswift.loader.family import (
    ATTENTION,
    FOUR_NORMS,
    GELU,
    NORMS_BEHIND,
    ONE_NORM,
    PROJECTIONS,
    QUERY_KEY_VALUE,
    REQUIRED,
    SILU,
    SIZES,
    Family,
)

LLAMA = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    biased=PROJECTIONS,
    gguf="llama",
    gguf_permuted=True,
)

MISTRAL = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": None,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "sliding_window": 4096,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    full_every=0,
    gguf_permuted=True,
)

MINISTRAL = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": None,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "sliding_window": 4096,
        "layer_types": None,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    full_every=0,
)

MINISTRAL3 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": 128,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    full_every=0,
    rope_bases=(1_000_000.0,),
    rope_fields=("llama_4_scaling_beta", "max_position_embeddings"),
    gguf="mistral3",
    gguf_permuted=True,
)

PHI3 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": None,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
        # which its modelling code passes over
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    full_every=0,
    fused=True,
    rope_fields=("partial_rotary_factor",),
    gguf="phi3",
)

QWEN2 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    biased=QUERY_KEY_VALUE,
    gguf="qwen2",
)

QWEN3 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": 128,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    biased=ATTENTION,
    head_norms="head",
    gguf="qwen3",
)

SMOLLM3 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": True,
    },
    biased=PROJECTIONS,
    rope_bases=(2_000_000.0,),
    gguf="smollm3",
    gguf_permuted=True,
)

GRANITE = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    biased=PROJECTIONS,
    gguf="granite",
    gguf_permuted=True,
    gguf_keys={
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    },
)

OLMO2 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    biased=ATTENTION,
    norms=NORMS_BEHIND,
    head_norms="projection",
    gguf="olmo2",
)

OLMO3 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "sliding_window": 4096,
        "layer_types": None,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    biased=ATTENTION,
    norms=NORMS_BEHIND,
    head_norms="projection",
    full_every=4,
    rope_bases=(500_000.0, 500_000.0),
)

COHERE2 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "layer_norm_eps": 1e-5,
        "hidden_act": SILU,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": None,
        "layer_types": None,
        "logit_scale": 0.0625,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": True,
    },
    biased=ATTENTION,
    norms=ONE_NORM,
    full_every=4,
    full_layers_rotate=False,
    interleaved_rope=True,
    parallel=True,
    gguf="cohere2",
    gguf_keys={
        "logit_scale": "logit_scale",
        "layer_norm_eps": "attention.layer_norm_epsilon",
    },
)

GEMMA2 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": REQUIRED,
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": True,
    },
    biased=ATTENTION,
    norms=FOUR_NORMS,
    plus_one=True,
    scales_embeddings=True,
    activation=GELU,
    full_every=2,
    gguf="gemma2",
    gguf_keys={
        "final_logit_softcapping": "final_logit_softcapping",
        "attn_logit_softcapping": "attn_logit_softcapping",
    },
    layers_scaled_by_width=46,
)

GEMMA3 = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": REQUIRED,
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "sliding_window": 4096,
        "sliding_window_pattern": None,
        "layer_types": None,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": True,
    },
    biased=ATTENTION,
    norms=FOUR_NORMS,
    head_norms="head",
    plus_one=True,
    scales_embeddings=True,
    activation=GELU,
    full_every=6,
    rope_bases=(1_000_000.0, 10_000.0),
    gguf="gemma3",
    layers_scaled_by_width=62,
)
