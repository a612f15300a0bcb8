"""What GGUF files call architectures, settings, numbers and weights."""

from __future__ import annotations

from tokenswift.loader.experts import CHOICE_BIAS
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import DOWN, GATE, KEY, OUTPUT, QUERY, UP, VALUE
from tokenswift.loader.layout import EMBEDDING, HEAD, NORM
from tokenswift.loader.recurrent import (
    DELTA_DECAY,
    DELTA_GATE,
    DELTA_INPUTS,
    DELTA_NORM,
    DELTA_OUT,
    DELTA_RATE,
    DELTA_SHIFT,
    DELTA_STRENGTH,
    DELTA_TAPS,
    SHORT_IN,
    SHORT_OUT,
    SHORT_TAPS,
)

#: what files call settings of sampling, where it is not `SamplingParams`' name
SETTINGS = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
FACTORS = "rope_freqs.weight"  # what Llama 3's rule divides each frequency by
#: LongRoPE's two lists of factors
LONGROPE = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
#: tensors that are no weights
OF_POSITIONS = (FACTORS, *LONGROPE.values())
#: what files call a config's numbers, behind the name of the architecture
NUMBER_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "rope_parameters.rope_theta": "rope.freq_base",
    "rope_parameters.factor": "rope.scaling.factor",
    "rope_parameters.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_parameters.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope_parameters.original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_parameters.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope_parameters.llama_4_scaling_beta": "attention.temperature_scale",
}
#: architectures that the native decoder runs, and transformers' names for them
ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
#: weights outside of layers
OUTER = {
    EMBEDDING: "token_embd.weight",
    NORM: "output_norm.weight",
    HEAD: "output.weight",
}
#: parts of a layer, but for the norms of states
INNER = {
    QUERY: "attn_q",
    KEY: "attn_k",
    VALUE: "attn_v",
    OUTPUT: "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    GATE: "ffn_gate",
    UP: "ffn_up",
    DOWN: "ffn_down",
}
#: parts of recurrent layers
RECURRENT = {
    SHORT_IN: "shortconv.in_proj",
    SHORT_TAPS: "shortconv.conv",
    SHORT_OUT: "shortconv.out_proj",
    DELTA_INPUTS: "attn_qkv",
    DELTA_GATE: "attn_gate",
    DELTA_STRENGTH: "ssm_beta",
    DELTA_DECAY: "ssm_alpha",
    DELTA_TAPS: "ssm_conv1d",
    DELTA_NORM: "ssm_norm",
    DELTA_OUT: "ssm_out",
}
#: its parts that are no weights of a projection or norm, by their whole names
RECURRENT_VECTORS = {
    DELTA_RATE: "ssm_a",
    DELTA_SHIFT: "ssm_dt.bias",
    CHOICE_BIAS: "exp_probs_b.bias",
}
#: what the final norm is called in files of LFM2
LFM2_NORM = "token_embd_norm.weight"
#: what the names of matrices have in them that are float32 in any file: routers and convolutions
FLOATS = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d")
#: parts of a layer with experts, one tensor for all of them
EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
#: ends of the names of parts that may have biases
HAVE_BIASES = ("_proj", "mlp.gate")
#: scores of attention without a value, a vector
SINKS_NAME = "attn_sinks"
#: fused projections, which are called as others are (`fused.FUSED`)
FUSED_NAMES = {
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
#: norms of a layer in the order of `families.Norms`
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
#: fields that say whether a model has biases, and parts of a layer that show it in files
BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
