"""Numbers of a model's files, held against one schema.

Files come from anybody. Every number that becomes a size, divides another or scales positions is
held against it (:func:`check_numbers`), of config.json and of GGUF metadata, before anything is
made of it: by its transformers' name, and named in messages as its file does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokenswift.checks import shown
from tokenswift.kernels.weights import MOST_EXPERTS
from tokenswift.loader.bounds import MOST_LAYERS, MOST_TOKENS, MOST_WIDTH
from tokenswift.types import InputError

#: greatest width of a head: the angles of the first positions are computed at once
MOST_HEAD = 1024
#: greatest number of heads
MOST_HEADS = 1 << 14

Positive: TypeAlias = Annotated[float, Meta(gt=0, le=1e12)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Width: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_WIDTH)]
HeadWidth: TypeAlias = Annotated[int, Meta(ge=2, le=MOST_HEAD)]
Heads: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_HEADS)]
Taps: TypeAlias = Annotated[int, Meta(ge=2, le=64)]
Layers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Experts: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_EXPERTS)]
Length: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 40)]
Window: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]
WindowLayers: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 20)]
Labels: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 16)]

#: greatest number of experts in all layers together
MOST_LAYERS_EXPERTS = 1 << 16

#: fields that hold positions: as configs have them, and as older ones do
ROPES = ("rope_parameters", "rope_scaling")


class RopeNumbers(msgspec.Struct):
    """Positions: ``rope_parameters`` of a config, or ``rope_scaling`` as older ones have it. All
    may be null; what is not stated is not looked at."""

    rope_theta: Positive | None | UnsetType = UNSET
    factor: Positive | None | UnsetType = UNSET
    attention_factor: Positive | None | UnsetType = UNSET
    beta_fast: Positive | None | UnsetType = UNSET
    beta_slow: Positive | None | UnsetType = UNSET
    low_freq_factor: Positive | None | UnsetType = UNSET
    high_freq_factor: Positive | None | UnsetType = UNSET
    mscale: NotNegative | None | UnsetType = UNSET
    mscale_all_dim: NotNegative | None | UnsetType = UNSET
    original_max_position_embeddings: Length | None | UnsetType = UNSET
    partial_rotary_factor: Share | None | UnsetType = UNSET
    short_factor: list[Positive] | None | UnsetType = UNSET
    long_factor: list[Positive] | None | UnsetType = UNSET
    llama_4_scaling_beta: NotNegative | None | UnsetType = UNSET
    max_position_embeddings: Length | None | UnsetType = UNSET


class Numbers(msgspec.Struct):
    """Numbers of a config; what is not stated is not looked at. Sizes are never null."""

    vocab_size: Tokens | UnsetType = UNSET
    hidden_size: Width | UnsetType = UNSET
    intermediate_size: Width | UnsetType = UNSET
    num_hidden_layers: Layers | UnsetType = UNSET
    no_rope_layer_interval: Layers | UnsetType = UNSET
    num_attention_heads: Heads | UnsetType = UNSET
    max_position_embeddings: Length | UnsetType = UNSET
    rms_norm_eps: Share | UnsetType = UNSET
    norm_eps: Share | UnsetType = UNSET
    conv_L_cache: Taps | UnsetType = UNSET
    conv_bias: bool | None | UnsetType = UNSET
    full_attn_idxs: list[int] | None | UnsetType = UNSET
    block_ff_dim: Width | UnsetType = UNSET
    block_multiple_of: Width | UnsetType = UNSET
    block_ffn_dim_multiplier: Positive | None | UnsetType = UNSET
    block_auto_adjust_ff_dim: bool | UnsetType = UNSET
    tie_embedding: bool | None | UnsetType = UNSET
    linear_conv_kernel_dim: Taps | UnsetType = UNSET
    linear_key_head_dim: HeadWidth | UnsetType = UNSET
    linear_value_head_dim: HeadWidth | UnsetType = UNSET
    linear_num_key_heads: Heads | UnsetType = UNSET
    linear_num_value_heads: Heads | UnsetType = UNSET
    linear_value_width: Width | UnsetType = UNSET
    full_attention_interval: Layers | None | UnsetType = UNSET
    num_dense_layers: WindowLayers | UnsetType = UNSET
    use_expert_bias: bool | None | UnsetType = UNSET
    routed_scaling_factor: Positive | UnsetType = UNSET
    attn_output_gate: bool | None | UnsetType = UNSET
    layer_norm_eps: Share | UnsetType = UNSET
    max_window_layers: WindowLayers | UnsetType = UNSET
    embedding_multiplier: Positive | UnsetType = UNSET
    residual_multiplier: Positive | UnsetType = UNSET
    attention_multiplier: Positive | UnsetType = UNSET
    logits_scaling: Positive | UnsetType = UNSET
    query_pre_attn_scalar: Positive | UnsetType = UNSET
    logit_scale: Positive | UnsetType = UNSET
    swiglu_alpha: Positive | UnsetType = UNSET
    swiglu_limit: Positive | UnsetType = UNSET
    num_experts: Experts | UnsetType = UNSET
    num_local_experts: Experts | UnsetType = UNSET
    num_experts_per_tok: Experts | UnsetType = UNSET
    moe_intermediate_size: Width | UnsetType = UNSET
    shared_expert_intermediate_size: Width | UnsetType = UNSET
    decoder_sparse_step: Layers | UnsetType = UNSET
    norm_topk_prob: bool | None | UnsetType = UNSET
    qkv_bias: bool | None | UnsetType = UNSET
    mlp_only_layers: list[int] | None | UnsetType = UNSET
    clip_qkv: Positive | None | UnsetType = UNSET
    num_key_value_heads: Heads | None | UnsetType = UNSET
    head_dim: HeadWidth | None | UnsetType = UNSET
    sliding_window: Window | None | UnsetType = UNSET
    num_labels: Labels | None | UnsetType = UNSET
    tie_word_embeddings: bool | None | UnsetType = UNSET
    attention_bias: bool | None | UnsetType = UNSET
    mlp_bias: bool | None | UnsetType = UNSET
    use_sliding_window: bool | None | UnsetType = UNSET
    use_bidirectional_attention: bool | None | UnsetType = UNSET
    sliding_window_pattern: Layers | None | UnsetType = UNSET
    layer_types: list[str] | None | UnsetType = UNSET
    no_rope_layers: list[int] | None | UnsetType = UNSET
    bos_token_id: int | None | UnsetType = UNSET
    eos_token_id: int | list[int] | None | UnsetType = UNSET
    original_max_position_embeddings: Length | None | UnsetType = UNSET
    partial_rotary_factor: Share | None | UnsetType = UNSET
    rope_theta: Positive | None | UnsetType = UNSET
    rope_local_base_freq: Positive | None | UnsetType = UNSET
    final_logit_softcapping: Positive | None | UnsetType = UNSET
    attn_logit_softcapping: Positive | None | UnsetType = UNSET
    rope_parameters: RopeNumbers | None | UnsetType = UNSET
    rope_scaling: RopeNumbers | None | UnsetType = UNSET


def check_numbers(
    fields: Mapping[str, object], where: str, file_names: Mapping[str, str] | None = None
) -> None:
    """Refuse numbers that no model has.

    Args:
        fields: fields of a config; those that the schema does not name are not looked at.
        where: the file, for messages.
        file_names: what the file calls a field, where that is not transformers' name.
    Raises:
        InputError: naming the first value that is wrong, and what is valid.
    """
    for name in ROPES:  # of each kind of layers
        rope = fields.get(name)
        for part in rope.values() if isinstance(rope, Mapping) else ():
            if isinstance(part, Mapping):
                check_numbers({name: part}, where, file_names)
    numbers = converted(fields, Numbers, where, file_names)
    _check_frequencies("rope_parameters", numbers.rope_parameters, where)
    _check_frequencies("rope_scaling", numbers.rope_scaling, where)
    fault = _heads_fault(numbers) or _experts_fault(numbers)
    if fault is not None:
        name, valid = fault
        raise refusal(where, (file_names or {}).get(name, name), fields[name], valid)


def _check_frequencies(name: str, rope: RopeNumbers | UnsetType | None, where: str) -> None:
    """Refuse Llama 3's rule with its two bounds the wrong way round."""
    if not isinstance(rope, RopeNumbers):
        return
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    if low and high and low >= high:
        valid = f"less than high_freq_factor, which is {high}"
        raise refusal(where, f"{name}.low_freq_factor", low, valid)


def _heads_fault(numbers: Numbers) -> tuple[str, str] | None:
    """A field that does not fit the number of heads, and what would be valid; None: all fit."""
    heads = numbers.num_attention_heads or 0
    if heads % (numbers.num_key_value_heads or 1):
        return "num_key_value_heads", f"a divisor of {heads}, the number of heads"
    name = "head_dim"
    width: float = numbers.head_dim or 2
    if numbers.head_dim is None and heads and numbers.hidden_size:  # which the heads share
        name = "hidden_size"
        width = numbers.hidden_size / heads
    if width % 2 or width > MOST_HEAD:
        return name, f"an even width of each of {heads} heads, up to {MOST_HEAD:,}"
    return None


def _experts_fault(numbers: Numbers) -> tuple[str, str] | None:
    """A field that does not fit the number of experts, and what would be valid; None: all fit."""
    name = "num_experts" if numbers.num_experts else "num_local_experts"
    experts = numbers.num_experts or numbers.num_local_experts
    if not experts:
        return None
    layers = numbers.num_hidden_layers or 1
    if experts * layers > MOST_LAYERS_EXPERTS:
        return name, f"up to {MOST_LAYERS_EXPERTS // layers:,} in each of {layers} layers"
    if numbers.num_experts_per_tok and numbers.num_experts_per_tok > experts:
        return "num_experts_per_tok", f"up to {experts}, the number of experts"
    return None


Struct = TypeVar("Struct", bound=msgspec.Struct)


def converted(
    fields: Mapping[str, object],
    struct: type[Struct],
    where: str,
    file_names: Mapping[str, str] | None = None,
) -> Struct:
    """Fields as a msgspec schema has them; the arguments are those of :func:`check_numbers`.

    Raises:
        InputError: naming the first value that is wrong, and what is valid.
    """
    try:
        return msgspec.convert(dict(fields), struct)
    except msgspec.ValidationError as error:
        valid, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition("[")[0]
        value: object = fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else value
        valid = valid.removeprefix("Expected ").partition(", got")[0].replace("`", "")
        raise refusal(where, (file_names or {}).get(name, name), value, valid) from None


def refusal(where: str, name: str, value: object, valid: str) -> InputError:
    """That a file says what no model's file says, in one line."""
    return InputError(f"{where}: {name} is {shown(value)}; valid: {valid}")
