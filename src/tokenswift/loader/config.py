"""A model's config: completed as its family has it, read from a folder; the sampling that it names.

:func:`completed` fills in what a config leaves out as its family has it; whatever is not known to
be taken as it stands (a field, a value of another type, positions of another kind) is left to
transformers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tokenswift.checks import shown
from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.bounds import check_bounds
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import EXPERT_COUNTS, FULL, REQUIRED, SILU, SLIDING, Family
from tokenswift.loader.fields import Fields
from tokenswift.loader.find import ADAPTER, MERGED
from tokenswift.loader.multimodal import is_wrapper, text_config
from tokenswift.loader.schema import ROPES, RopeNumbers, check_numbers, refusal
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
#: what runs
SUPPORTED = "causal language models with rotary positions, such as Llama, Qwen or Mistral"
#: ends of the names of causal language models' classes
CAUSAL = ("ForCausalLM", "LMHeadModel")
#: formats of quantized checkpoints that are not read
QUANTIZED = ("gptq", "awq", "compressed-tensors")

# ---- the config of a family ----------------------------------------------------------------------

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
#: parameters that each kind of positions needs besides its theta
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
#: all parameters that positions may have
KNOWN_ROPE_FIELDS = {"rope_type", "type", "truncate", *RopeNumbers.__struct_fields__}
KNOWN_ROPE_FIELDS -= {field for family in FAMILIES.values() for field in family.rope_fields}
#: an older name of positions
OLDER_NAMES = {"su": "longrope"}
#: what configs call the length that a factor of positions extends
TRAINED_LENGTH = "original_max_position_embeddings"
#: how much queries grow with their positions, and which share of a head positions rotate
QUERY_SCALE = "llama_4_scaling_beta"
ROTATED_SHARE = "partial_rotary_factor"


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
    stated = _with_own_count(stated, family)
    known = {"head_dim": None, **family.defaults}  # which is read without a default
    if not stated.keys() <= known.keys() | IGNORED_FIELDS:
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
    rope = positions_said({**fields, **stated}, positions, family.rope_bases, family.rope_fields)
    activation = fields.get("hidden_activation", fields["hidden_act"])
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
    kinds = reader.texts("layer_types")
    if kinds is None:
        slides = _sliding_layers(fields, family, layers, rotated)
        windowed = fields["sliding_window"] is not None or len(family.rope_bases) > 1
        kinds = [SLIDING if windowed and slide else FULL for slide in slides]
        fields["layer_types"] = kinds
    if len(kinds) != layers or (rotated and len(rotated) < layers):
        return False
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


def positions_said(
    stated: Mapping[str, object],
    limit: int,
    bases: Sequence[float] = (10_000.0,),
    more: Sequence[str] = (),
) -> dict[str, object] | None:
    """``rope_parameters`` of what a file states, of older ones too; None: of a kind that is not
    known here.

    Args:
        limit: positions of the model.
        bases: theta where none is stated; of two, the second is that of layers with windows, which
            have positions of their own.
        more: parameters that the family has besides (`Family.rope_fields`).
    """
    rope = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return None
    if len(bases) > 1:
        return _positions_by_layer(stated, rope, limit, bases)
    parameters = {name: value for name, value in rope.items() if value is not None}
    parameters.setdefault("rope_theta", stated.get("rope_theta") or bases[0])
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    kind = parameters["rope_type"]
    if not isinstance(kind, str):
        return None
    kind = parameters["rope_type"] = OLDER_NAMES.get(kind, kind)
    if kind not in ROPE_FIELDS:
        return None
    if type(parameters.get("truncate", True)) is not bool:
        return None
    if not {*ROPE_FIELDS[kind]} <= parameters.keys() <= {*KNOWN_ROPE_FIELDS, *more}:
        return None
    if kind == "longrope" and stated.get(TRAINED_LENGTH) is not None:
        parameters[TRAINED_LENGTH] = stated[TRAINED_LENGTH]
    if kind in ("llama3", "yarn", "longrope"):
        parameters.setdefault(TRAINED_LENGTH, limit)
    if ROTATED_SHARE in more:
        parameters.setdefault(ROTATED_SHARE, stated.get(ROTATED_SHARE) or 1.0)
    return parameters


def _positions_by_layer(
    stated: Mapping[str, object], rope: Mapping[str, object], limit: int, bases: Sequence[float]
) -> dict[str, object] | None:
    """``rope_parameters`` of layers that see everything, and of those with windows."""
    parts = rope if FULL in rope or SLIDING in rope else {FULL: rope}
    full = positions_said(
        {
            "rope_parameters": parts.get(FULL),
            "rope_theta": stated.get("rope_theta", bases[0]),
        },
        limit,
    )
    sliding = positions_said(
        {
            "rope_parameters": parts.get(SLIDING),
            "rope_theta": stated.get("rope_local_base_freq", bases[1]),
        },
        limit,
    )
    if full is None or sliding is None or "longrope" in (full["rope_type"], sliding["rope_type"]):
        return None
    return {FULL: full, SLIDING: sliding}


def counts_factor(stated: Mapping[str, object]) -> bool:
    """Whether ``max_position_embeddings`` of a file counts the factor of YaRN already: where the
    file does not say which length the factor extends."""
    rope = stated.get("rope_scaling") or stated.get("rope_parameters")
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return False
    return rope.get(TRAINED_LENGTH) is None and stated.get(TRAINED_LENGTH) is None


# ---- the files of a folder -----------------------------------------------------------------------


def read_config(name: str, path: Path) -> dict[str, object]:
    """What a config.json says, of a model of text and pictures what it says of the text model; one
    with numbers that no model has is refused before a config is made of it.

    Args:
        name: the model's, for messages.
    Raises:
        InputError: naming the value, and what is valid.
    """
    where = f"config.json of model {name}"
    if path.with_name(ADAPTER).exists():
        raise InputError(f"model folder {name} holds an adapter; valid: {MERGED}")
    stated: dict[str, object] = object_in(path, MOST_CONFIG, f"model {name}")
    check_bounds(stated, where)
    quantization = stated.get("quantization_config") or stated.get("compression_config")
    if is_wrapper(stated):
        _check_plain(name, quantization, (*QUANTIZED, "fp8"))
        stated = text_config(stated)
    else:
        _check_causal(name, stated.get("architectures"))
        _check_plain(name, quantization)
    _check_stated_once(stated, where)
    kind = stated.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        defaults = FAMILIES[kind].defaults.items()
        numbers = {field: value for field, value in defaults if value is not REQUIRED}
        check_numbers({"head_dim": None, **numbers, **stated}, where)
    else:  # other families have lists and names of their own
        numbers = {field: value for field, value in stated.items() if _is_checked(field, value)}
        check_numbers(numbers, where)
    return stated


def _is_checked(name: str, value: object) -> bool:
    """Whether a field of a family that is not known here means what the schema says."""
    return type(value) is int or (name in ROPES and isinstance(value, Mapping))


def _check_causal(name: str, architectures: object) -> None:
    """Refuse classes that are no causal language models: of others the same weights are read."""
    named = architectures or [CAUSAL[0]]
    if isinstance(named, list) and all(str(each).endswith(CAUSAL) for each in named):
        return
    raise InputError(
        f"model {name} is not a causal language model (its architectures are {shown(named)}); "
        f"valid: {SUPPORTED}"
    )


def _check_plain(name: str, quantization: object, methods: Sequence[str] = QUANTIZED) -> None:
    """Refuse weights in formats that nothing here takes apart."""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method in methods:
        raise InputError(
            f"model {name} is quantized by {method}; valid: the checkpoint that it was made from "
            "(weights q4_0 or q8_0 quantizes it here), or a GGUF file"
        )


def _check_stated_once(stated: Mapping[str, object], where: str) -> None:
    """Refuse positions that are stated in two ways which differ: one would be dropped."""
    newer = stated.get("rope_parameters")
    older = stated.get("rope_scaling")
    if newer and older and newer != older:
        raise refusal(where, "rope_scaling", older, "rope_parameters alone, with all of it")
    field = "rope_scaling" if older else "rope_parameters"
    rope = older or newer
    if not isinstance(rope, Mapping):
        return
    _check_theta(stated, "rope_theta", rope, field, where)
    _check_theta(stated, "rope_theta", rope.get(FULL), f"{field}.{FULL}", where)
    _check_theta(stated, "rope_local_base_freq", rope.get(SLIDING), f"{field}.{SLIDING}", where)


def _check_theta(
    stated: Mapping[str, object], name: str, part: object, place: str, where: str
) -> None:
    """Refuse a theta of positions that is another one than the config's own field of it."""
    theta = part.get("rope_theta") if isinstance(part, Mapping) else None
    outer = stated.get(name)
    if theta is not None and outer is not None and theta != outer:
        valid = f"{shown(outer)}, which {name} is, or a config with one of the two"
        raise refusal(where, f"{place}.rope_theta", theta, valid)


# ---- the sampling that a model itself names ------------------------------------------------------

#: fields of `SamplingParams` that a generation_config.json may have
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")


def named_sampling(config: object) -> dict[str, object]:
    """The fields of `SamplingParams` that a transformers ``GenerationConfig`` names; of
    None, none."""
    settings: dict[str, object] = {}
    for name in SAMPLING:
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = value
    if getattr(config, "do_sample", None) is False:
        settings["greedy"] = True
    return settings


def usable_sampling(named: Mapping[str, object], model: str) -> SamplingParams | None:
    """The sampling of the settings that a model names, without those out of their range: a WARNING
    of the logger ``tokenswift`` names each of these. None: there are no others.

    Args:
        named: fields of `SamplingParams`.
        model: its name, for messages.
    """
    usable: SamplingParams | None = None
    settings: dict[str, object] = {**NEUTRAL}
    for name, value in named.items():
        more = {**settings, name: value}
        try:
            usable = replace(SamplingParams(), **more)
        except InputError as error:
            logger.warning("a sampling setting of model %s is ignored: %s", model, error)
        else:
            settings = more
    return usable
