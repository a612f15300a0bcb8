"""Families of the native decoder, and the layers that they name.

There is one decoder, and for each family what sets it apart, as data. To add one: give it an entry
in `FAMILIES` with the fields of its config and their defaults, as its configuration class in
transformers has them, and those of the switches of `Family` that it needs. Numbers that a config
may hold (multipliers, caps, windows, layers without positions) are read by `layout.layout_of` where
the family's defaults name them. Where GGUF files of it exist, say what they call it (``gguf``) and
its numbers (``gguf_keys``), and whether they permute its rows (``gguf_permuted``). Then add it,
tiny, to tests/tiny.py: the tests hold it against transformers. What no switch expresses stays with
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Final, NamedTuple

#: kinds of layers
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
#: activations of MLPs
SILU: Final = "silu"
GELU: Final = "gelu_pytorch_tanh"

#: projections of a layer
QUERY: Final = "self_attn.q_proj"
KEY: Final = "self_attn.k_proj"
VALUE: Final = "self_attn.v_proj"
OUTPUT: Final = "self_attn.o_proj"
GATE: Final = "mlp.gate_proj"
UP: Final = "mlp.up_proj"
DOWN: Final = "mlp.down_proj"
QUERY_KEY_VALUE = (QUERY, KEY, VALUE)
ATTENTION = (QUERY, KEY, VALUE, OUTPUT)
PROJECTIONS = (QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN)


class Norms(NamedTuple):
    """Names of a layer's norms; None: there is none in this place."""

    before_attention: str | None
    behind_attention: str | None
    before_mlp: str | None
    behind_mlp: str | None


NORMS_BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
NORMS_BEHIND = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
FOUR_NORMS = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
ONE_NORM = Norms("input_layernorm", None, None, None)

#: stands for a default that there is none of: a file has to say the number, or transformers' own
#: default may be another one
REQUIRED: EllipsisType = ...

#: numbers that every family's files have to say
SIZES = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "max_position_embeddings": REQUIRED,
}


#: what GGUF files call the numbers of experts
EXPERT_KEYS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
LOCAL_EXPERT_KEYS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
#: what some configs call the number of experts, and others otherwise
EXPERT_COUNTS = ("num_experts", "num_local_experts")


class ExpertFields(NamedTuple):
    """How a family's config describes its experts.

    Attributes:
        count: the field that says how many there are.
        width: the field that says how wide each is.
        shared: the field that says how wide the expert is that all rows go through, which has a
            gate; "": there is none.
        renormalised: whether a row's scores are divided by their sum. Where the defaults name
            ``norm_topk_prob``, the config says so.
        gguf_renormalised: the same for GGUF files, which mostly do not say it.
    """

    count: str
    width: str
    shared: str = ""
    renormalised: bool = False
    gguf_renormalised: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family's decoder apart from Llama's.

    Attributes:
        defaults: fields of its config that its forward pass depends on, and their defaults.
        biased: projections that may have biases.
        norms: names of the norms of a layer.
        head_norms: norms of queries and keys: "" (none), "head", or "projection" (over all heads
            together).
        plus_one: whether norms multiply by 1 + their weight.
        activation: the activation of the MLP.
        full_every: one layer in so many sees everything where the config does not say which; 0:
            none does.
        rope_bases: bases of the rotary frequencies; two where layers with windows have their own.
        full_layers_rotate: whether layers that see everything know positions.
        interleaved_rope: whether positions rotate neighbouring numbers of a head, rather than
            those of its two halves.
        fused: whether files hold queries, keys and values as one tensor, and gate and up as one
            (`fused.FUSED`).
        rope_fields: parameters of positions that its configs have besides the usual ones.
        parallel: whether attention and MLP take in the same norm, a LayerNorm, which takes the mean
            from states.
        gguf: what GGUF files call it; "": none do.
        gguf_permuted: whether GGUF files have rows of queries and keys in another order, in which
            positions rotate neighbours.
        gguf_keys: what GGUF files call numbers of its config that others lack.
        experts: how its config describes a mixture of experts; None: layers have one MLP.
        fixed: values of fields other than which it is left to transformers.
        layers_scaled_by_width: layers of the one model whose scores are scaled by the width of its
            states per head, rather than by that of a head (Gemma).
    """

    defaults: Mapping[str, object]
    biased: tuple[str, ...] = ()
    norms: Norms = NORMS_BEFORE
    head_norms: str = ""
    plus_one: bool = False
    activation: str = SILU
    full_every: int = 1
    rope_bases: tuple[float, ...] = (10_000.0,)
    full_layers_rotate: bool = True
    interleaved_rope: bool = False
    fused: bool = False
    rope_fields: tuple[str, ...] = ()
    parallel: bool = False
    gguf: str = ""
    gguf_permuted: bool = False
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertFields | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    layers_scaled_by_width: int = 0


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
    activation=GELU,
    full_every=6,
    rope_bases=(1_000_000.0, 10_000.0),
    gguf="gemma3",
    layers_scaled_by_width=62,
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

#: by the model type of transformers' configs
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "ministral3": MINISTRAL3,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "cohere2": COHERE2,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "mixtral": MIXTRAL,
    "granitemoe": GRANITE_MOE,
}
