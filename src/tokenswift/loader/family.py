"""What sets a family of the native decoder apart, and names of the layers that it speaks of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Final, NamedTuple

#: kinds of layers
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CONVOLUTION: Final = "conv"
LINEAR: Final = "linear_attention"
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
        biased: whether the router and the experts have biases.
        sigmoid: whether a score is a logit's sigmoid.
        choice_bias: whether a bias is added to the scores by which experts are chosen.
        in_turn: whether checkpoints hold gate and up of all experts row by row in turn, in matrices
            the other way round (`experts.IN_TURN_NAMES`).
    """

    count: str
    width: str
    shared: str = ""
    renormalised: bool = False
    gguf_renormalised: bool = False
    biased: bool = False
    sigmoid: bool = False
    choice_bias: bool = False
    in_turn: bool = False


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
        scales_embeddings: whether embeddings are multiplied with the root of their width.
        output_gate: whether queries' projection has, behind each head's query, a gate of what the
            head's attention gives.
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
        rope: positions where a config says none; of GGUF files, what these do not say.
        parallel: whether attention and MLP take in the same norm, a LayerNorm, which takes the mean
            from states.
        gguf: what GGUF files call it; "": none do.
        gguf_permuted: whether GGUF files have rows of queries and keys in another order, in which
            positions rotate neighbours.
        gguf_keys: what GGUF files call numbers of its config that others lack.
        gguf_names: what they call parts of a layer, where others call them otherwise.
        experts: how its config describes a mixture of experts; None: layers have one MLP.
        sinks: whether attention has a score for each head that takes part in the softmax and has no
            value.
        fixed: values of fields other than which it is left to transformers.
        recurrent: what its configs call layers that are recurrent, rather than attend; "": none
            are.
        names: parts of the names of its weights, and what these are called here.
        ignored: fields of its configs that nothing depends on.
        aliases: other names of its fields, in some configs.
        layers_scaled_by_width: layers of the one model whose scores are scaled by the width of its
            states per head, rather than by that of a head (Gemma).
    """

    defaults: Mapping[str, object]
    biased: tuple[str, ...] = ()
    norms: Norms = NORMS_BEFORE
    head_norms: str = ""
    plus_one: bool = False
    scales_embeddings: bool = False
    output_gate: bool = False
    activation: str = SILU
    full_every: int = 1
    rope_bases: tuple[float, ...] = (10_000.0,)
    full_layers_rotate: bool = True
    interleaved_rope: bool = False
    fused: bool = False
    rope_fields: tuple[str, ...] = ()
    rope: Mapping[str, object] = field(default_factory=dict)
    parallel: bool = False
    gguf: str = ""
    gguf_permuted: bool = False
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertFields | None = None
    sinks: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict)
    recurrent: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    layers_scaled_by_width: int = 0
