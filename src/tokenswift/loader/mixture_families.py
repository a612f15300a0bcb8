"""Families whose layers have experts."""

from __future__ import annotations

from tokenswift.loader.dense_families import GRANITE
from tokenswift.loader.family import (
    ATTENTION,
    EXPERT_KEYS,
    LOCAL_EXPERT_KEYS,
    QUERY_KEY_VALUE,
    REQUIRED,
    SILU,
    SIZES,
    ExpertFields,
    Family,
)

QWEN2_MOE = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "num_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
        "moe_intermediate_size": REQUIRED,
        "shared_expert_intermediate_size": REQUIRED,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    biased=QUERY_KEY_VALUE,
    experts=ExpertFields(
        count="num_experts",
        width="moe_intermediate_size",
        shared="shared_expert_intermediate_size",
    ),
    fixed={"use_sliding_window": False},
    gguf="qwen2moe",
    gguf_keys={
        **EXPERT_KEYS,
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
)

QWEN3_MOE = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": None,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
        "moe_intermediate_size": REQUIRED,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    biased=ATTENTION,
    head_norms="head",
    experts=ExpertFields(
        count="num_experts", width="moe_intermediate_size", gguf_renormalised=True
    ),
    fixed={"use_sliding_window": False},
    gguf="qwen3moe",
    gguf_keys={**EXPERT_KEYS, "moe_intermediate_size": "expert_feed_forward_length"},
)

OLMOE = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": SILU,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
        "norm_topk_prob": False,
        "bos_token_id": None,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    biased=ATTENTION,
    head_norms="projection",
    experts=ExpertFields(count="num_experts", width="intermediate_size"),
    fixed={"clip_qkv": None},
    gguf="olmoe",
    gguf_keys=EXPERT_KEYS,
)

MIXTRAL = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": REQUIRED,
        "head_dim": None,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "sliding_window": None,
        "num_local_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    full_every=0,
    rope_bases=(1_000_000.0,),
    experts=ExpertFields(
        count="num_local_experts",
        width="intermediate_size",
        renormalised=True,
        gguf_renormalised=True,
    ),
    gguf_permuted=True,
    gguf_keys=LOCAL_EXPERT_KEYS,
)

GRANITE_MOE = Family(
    defaults={
        **SIZES,
        "num_key_value_heads": None,
        "rms_norm_eps": REQUIRED,
        "hidden_act": SILU,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_local_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
        "bos_token_id": REQUIRED,
        "eos_token_id": REQUIRED,
        "tie_word_embeddings": False,
    },
    biased=ATTENTION,
    experts=ExpertFields(
        count="num_local_experts",
        width="intermediate_size",
        renormalised=True,
        gguf_renormalised=True,
    ),
    gguf="granitemoe",
    gguf_permuted=True,
    gguf_keys={**GRANITE.gguf_keys, **LOCAL_EXPERT_KEYS},
)
