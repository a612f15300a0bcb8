"""A model's config, completed as its family has it.

:func:`completed` fills in what a config leaves out as its family has it; whatever is not known to
be taken as it stands (a field, a value of another type, positions of another kind) is left to
transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace

from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import EXPERT_COUNTS, FULL, REQUIRED, SILU, SLIDING, Family
from tokenswift.loader.fields import Fields
from tokenswift.loader.positions import (
    QUERY_SCALE,
    counts_factor,
    positions_said,
)
from tokenswift.loader.recurrent import layer_kinds
from tokenswift.loader.schema import ROPES

#: fields that a forward pass does not depend on, or that are looked at elsewhere
IGNORED_FIELDS = {
    # where it comes from
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "model_type",
    "transformers.js_config",
    "transformers_version",
    "auto_map",
    "unsloth_fixed",
    "unsloth_version",
    # for training, and for transformers' own code
    "attention_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "cache_implementation",
    "dtype",
    "initializer_range",
    "is_llama_config",
    "pad_token_id",
    "output_router_logits",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "torch_dtype",
    "unk_token_id",
    "use_cache",
    # positions, and what is the same in all models of a family
    *ROPES,
    "_sliding_window_pattern",
    "full_attn_mod",
    "interpolate_factor",
    "layer_switch",
    "max_window_layers",
    "order_of_interleaved_layers",
    "position_embedding_type",
    "rope_interleaved",
    "rope_local_base_freq",
    "rope_theta",
    "rotary_pct",
    "use_embedding_sharing",
    "use_gated_activation",
    "use_mrope",
    "use_parallel_block",
    "use_parallel_embedding",
    # sampling
    "do_sample",
    "eta_cutoff",
    "max_length",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
}


class ModelConfig(SimpleNamespace):
    """What a config says of a family's forward pass, by the attributes of transformers' own config;
    those that are the family's alone stand beside these.

    Attributes:
        dtype: the type of the weights, as the file names it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    rope_parameters: dict[str, object]
    dtype: object


def completed(kind: str, stated: Mapping[str, object]) -> ModelConfig | None:
    """What a config says of a family's forward pass: what a file states, and the family's
    defaults.

    Args:
        kind: the family.
        stated: fields of the file, whose numbers were checked (:func:`check_numbers`).
    Returns:
        None where transformers may understand it otherwise.
    """
    family = FAMILIES[kind]
    stated = _without_blocks(_with_own_count(stated, family), family)
    stated = {family.aliases.get(name, name): value for name, value in stated.items()}
    known = {"head_dim": None, **family.defaults}  # which is read without a default
    if not stated.keys() <= known.keys() | IGNORED_FIELDS | {*family.ignored}:
        return None
    fields = {**family.defaults}
    for name, value in stated.items():
        if name in known:
            fields[name] = copy.deepcopy(value)
    if REQUIRED in fields.values():
        return None
    if any(fields[name] not in (value, None) for name, value in family.fixed.items()):
        return None
    reader = Fields(fields)
    hidden_size = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    if "head_dim" in family.defaults and fields["head_dim"] is None:
        fields["head_dim"] = hidden_size // heads
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or heads
    positions = reader.integer("max_position_embeddings")
    all_fields = {**fields, **stated}
    if family.rope and not any(all_fields.get(name) for name in ROPES):
        all_fields["rope_parameters"] = family.rope
    rope = positions_said(all_fields, positions, family.rope_bases, family.rope_fields)
    activation = fields.get("hidden_activation", fields.get("hidden_act", SILU))
    if rope is None or activation != family.activation:
        return None
    if kind == "llama" and hidden_size % heads:
        return None
    if QUERY_SCALE in family.rope_fields and not _scales_queries(rope):
        return None
    if fields.get("use_bidirectional_attention") or not _take_layer_types(fields, family):
        return None
    dtype = stated.get("dtype") or stated.get("torch_dtype")
    config = ModelConfig(**fields, rope_parameters=rope, model_type=kind, dtype=dtype)
    if counts_factor(stated):
        config.counts_factor = True
    return config


def _with_own_count(stated: Mapping[str, object], family: Family) -> Mapping[str, object]:
    """The number of experts by the name that the family's config has for it."""
    if family.experts is None or family.experts.count in stated:
        return stated
    count = family.experts.count
    return {count if name in EXPERT_COUNTS else name: value for name, value in stated.items()}


def _without_blocks(stated: Mapping[str, object], family: Family) -> Mapping[str, object]:
    """Fields without the one that says that experts are stored in MXFP4, as their tensors show."""
    quantization = stated.get("quantization_config")
    if family.experts is None or not family.experts.in_turn or quantization is None:
        return stated
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "mxfp4":
        return stated
    return {name: value for name, value in stated.items() if name != "quantization_config"}


def _scales_queries(rope: Mapping[str, object]) -> bool:
    """Whether positions say how queries grow with them."""
    return rope["rope_type"] == "yarn" and rope.get(QUERY_SCALE) is not None


def activation_of(config: object) -> object:
    """The activation that a config says, Gemma's by another name."""
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", SILU)


def _take_layer_types(fields: dict[str, object], family: Family) -> bool:
    """Fill in which layers see a window, and which know no positions; False where the file names
    others."""
    reader = Fields(fields)
    layers = reader.integer("num_hidden_layers")
    rotated = reader.integers("no_rope_layers")
    if "no_rope_layers" in fields and rotated is None:
        every = reader.integer("no_rope_layer_interval")
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
        fields["no_rope_layers"] = rotated
    if "layer_types" not in fields:
        return True
    if not fields.get("use_sliding_window", True):
        fields["sliding_window"] = None
    kinds = reader.texts("layer_types") or layer_kinds(fields, family, layers)
    if kinds is not None:
        fields["layer_types"] = kinds
    if kinds is None:
        slides = _sliding_layers(fields, family, layers, rotated)
        windowed = fields["sliding_window"] is not None or len(family.rope_bases) > 1
        kinds = [SLIDING if windowed and slide else FULL for slide in slides]
        fields["layer_types"] = kinds
    if len(kinds) != layers or (rotated and len(rotated) < layers):
        return False
    if family.recurrent:
        return {FULL, family.recurrent} == set(kinds)
    return set(kinds) <= {FULL, SLIDING}


def _sliding_layers(
    fields: Mapping[str, object], family: Family, layers: int, rotated: list[int] | None
) -> list[bool]:
    """Whether each layer sees a window alone, where the config does not say which do."""
    reader = Fields(fields)
    if "max_window_layers" in fields:
        first = reader.integer("max_window_layers")
        return [layer >= first for layer in range(layers)]
    if rotated:
        return [not rotates for rotates in rotated]
    every = family.full_every
    if fields.get("sliding_window_pattern"):
        every = reader.integer("sliding_window_pattern")
    return [every == 0 or (layer + 1) % every != 0 for layer in range(layers)]
