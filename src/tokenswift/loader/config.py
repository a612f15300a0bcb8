"""A model's config: completed as its family has it, read from a folder; the sampling that it names.

:func:`completed` fills in what a config leaves out as its family has it; whatever is not known to
be taken as it stands (a field, a value of another type, positions of another kind) is left to
transformers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenswift.checks import shown
from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.bounds import check_bounds
from tokenswift.loader.families import FAMILIES, FULL, SILU, SLIDING, Family
from tokenswift.loader.find import ADAPTER, MERGED
from tokenswift.loader.schema import ROPE, ROPES, check_numbers, refusal
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
ASIDE = (
    "is_llama_config",
    "rope_interleaved",
    "transformers.js_config",
    "unk_token_id",
    "use_mrope",
)
ASIDE += (
    "_model_name_or_path",
    "unsloth_version",
    "unsloth_fixed",
    "use_cache",
    "initializer_range",
)
ASIDE += ("attention_dropout", "pad_token_id", "pretraining_tp", "architectures", "model_type")
ASIDE += ("transformers_version", "_name_or_path", "dtype", "torch_dtype", *ROPES, "rope_theta")
ASIDE += (
    "cache_implementation",
    "max_window_layers",
    "rope_local_base_freq",
    "_sliding_window_pattern",
)
ASIDE += ("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct")
ASIDE += (
    "use_embedding_sharing",
    "use_gated_activation",
    "use_parallel_block",
    "use_parallel_embedding",
)
ASIDE += (
    "do_sample",
    "eta_cutoff",
    "max_length",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
#: parameters that each kind of positions needs besides its theta
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def completed(kind: str, said: Mapping[str, Any]) -> SimpleNamespace | None:
    """What a config says of a family's forward pass, by the attributes of transformers' own config:
    of what a file says and the family's defaults.

    Args:
        kind: the family.
        said: fields of the file, whose numbers were checked (:func:`check_numbers`).
    Returns:
        None where transformers may understand it otherwise.
    """
    family = FAMILIES[kind]
    usual = family.defaults
    known = {"head_dim": None, **usual}  # read without a default
    if not said.keys() <= {*known, *ASIDE}:
        return None
    fields = copy.deepcopy(usual | {key: value for key, value in said.items() if key in known})
    if any(value is ... for value in fields.values()):
        return None
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if "head_dim" in usual and fields["head_dim"] is None:
        fields["head_dim"] = hidden // heads
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or heads
    rope = positions_said(said, fields["max_position_embeddings"], family.rope_bases)
    activation = fields.get("hidden_activation", fields["hidden_act"])
    if rope is None or activation != family.activation or (kind == "llama" and hidden % heads):
        return None
    if fields.get("use_bidirectional_attention") or not _take_layer_types(fields, family):
        return None
    dtype = said.get("dtype") or said.get("torch_dtype")
    own = SimpleNamespace(**fields, rope_parameters=rope, model_type=kind, dtype=dtype)
    if counts_factor(said):
        own.counts_factor = True
    return own


def activation_of(config: Any) -> Any:
    """The activation that a config says, Gemma's by another name."""
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", SILU)


def _take_layer_types(fields: dict[str, Any], family: Family) -> bool:
    """Fill in which layers see a window, and which know no positions; False where the file names
    others."""
    layers, turned = fields["num_hidden_layers"], fields.get("no_rope_layers", ())
    if turned is None:
        every = fields["no_rope_layer_interval"]
        turned = fields["no_rope_layers"] = [int((n + 1) % every != 0) for n in range(layers)]
    if "layer_types" not in fields:
        return True
    if not fields.get("use_sliding_window", True):
        fields["sliding_window"] = None
    if fields["layer_types"] is None:
        every = fields.get("sliding_window_pattern") or family.full_every
        slides = [every == 0 or (n + 1) % every != 0 for n in range(layers)]
        if "max_window_layers" in fields:
            slides = [n >= fields["max_window_layers"] for n in range(layers)]
        elif turned:
            slides = [not turns for turns in turned]
        windowed = fields["sliding_window"] is not None or len(family.rope_bases) > 1
        fields["layer_types"] = [SLIDING if windowed and slide else FULL for slide in slides]
    kinds = fields["layer_types"]
    return len(kinds) == layers <= len(turned or kinds) and set(kinds) <= {FULL, SLIDING}


def positions_said(
    said: Mapping[str, Any], limit: int, bases: Sequence[float] = (10_000.0,)
) -> dict[str, Any] | None:
    """``rope_parameters`` of what a file says, of older ones too; None: of a kind that is not known
    here.

    Args:
        bases: theta where none is said; of two, the second is that of layers with windows, which
            have positions of their own.
    """
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return None
    if len(bases) > 1:
        parts = rope if FULL in rope or SLIDING in rope else {FULL: rope}
        thetas = {FULL: ("rope_theta", bases[0]), SLIDING: ("rope_local_base_freq", bases[1])}
        found = {
            kind: positions_said(
                {"rope_parameters": parts.get(kind), "rope_theta": said.get(*theta)}, limit
            )
            for kind, theta in thetas.items()
        }
        return None if None in found.values() else found
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("rope_theta", said.get("rope_theta") or bases[0])
    rope.setdefault("rope_type", rope.get("type", "default"))
    kind, known = (
        rope["rope_type"],
        {"rope_type", "type", "truncate", *ROPE} - {"partial_rotary_factor"},
    )
    if (
        not isinstance(kind, str)
        or kind not in ROPE_FIELDS
        or type(rope.get("truncate", True)) is not bool
    ):
        return None
    if not {*ROPE_FIELDS[kind]} <= rope.keys() <= known:
        return None
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", limit)
    return rope


def counts_factor(said: Mapping[str, object]) -> bool:
    """Whether ``max_position_embeddings`` of a file counts the factor of YaRN already: where the
    file does not say which length the factor extends."""
    rope = said.get("rope_scaling") or said.get("rope_parameters")
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return False
    length = "original_max_position_embeddings"
    return rope.get(length) is None and said.get(length) is None


# ---- the files of a folder -----------------------------------------------------------------------


def read_config(name: str, path: Path) -> dict[str, Any]:
    """What a config.json says; one with numbers that no model has is refused before a config is
    made of it.

    Args:
        name: the model's, for messages.
    Raises:
        InputError: naming the value, and what is valid.
    """
    where = f"config.json of model {name}"
    if path.with_name(ADAPTER).exists():
        raise InputError(f"model folder {name} holds an adapter; valid: {MERGED}")
    said = object_in(path, MOST_CONFIG, f"model {name}")
    check_bounds(said, where)
    _check_causal(name, said.get("architectures"))
    _check_plain(name, said.get("quantization_config") or said.get("compression_config"))
    _check_stated_once(said, where)
    if (kind := said.get("model_type")) in FAMILIES:
        usual = {name: value for name, value in FAMILIES[kind].defaults.items() if value is not ...}
        check_numbers({"head_dim": None} | usual | said, where)
    else:  # other families have lists and names of their own
        check_numbers({key: value for key, value in said.items() if _is_checked(key, value)}, where)
    return said


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


def _check_plain(name: str, quantization: object) -> None:
    """Refuse weights in formats that nothing here takes apart."""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method in QUANTIZED:
        raise InputError(
            f"model {name} is quantized by {method}; valid: the checkpoint that it was made from "
            "(weights q4_0 or q8_0 quantizes it here), or a GGUF file"
        )


def _check_stated_once(said: Mapping[str, object], where: str) -> None:
    """Refuse positions that are stated in two ways which differ: one would be dropped."""
    newer, older = map(said.get, ROPES)
    if newer and older and newer != older:
        raise refusal(where, "rope_scaling", older, "rope_parameters alone, with all of it")
    field, rope = ("rope_scaling", older) if older else ("rope_parameters", newer)
    if not isinstance(rope, Mapping):
        return
    outer = {"": "rope_theta", FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    for kind, name in outer.items():
        part = rope.get(kind) if kind else rope
        theta = part.get("rope_theta") if isinstance(part, Mapping) else None
        if theta is not None and said.get(name) is not None and theta != said[name]:
            place = ".".join(filter(None, (field, kind, "rope_theta")))
            valid = f"{shown(said[name])}, which {name} is, or a config with one of the two"
            raise refusal(where, place, theta, valid)


# ---- the sampling that a model itself names ------------------------------------------------------

#: fields of `SamplingParams` that a generation_config.json may have
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")


def named_sampling(config: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that a transformers ``GenerationConfig`` names; of
    None, none."""
    found = {key: value for key in SAMPLING if (value := getattr(config, key, None)) is not None}
    return found | ({"greedy": True} if getattr(config, "do_sample", None) is False else {})


def usable_sampling(named: Mapping[str, object], model: str) -> SamplingParams | None:
    """The sampling of the settings that a model names, without those out of their range: a WARNING
    of the logger ``tokenswift`` names each of these. None: there are no others.

    Args:
        named: fields of `SamplingParams`.
        model: its name, for messages.
    """
    usable: SamplingParams | None = None
    settings = NEUTRAL
    for name, value in named.items():
        more = dict(settings)
        more[name] = value
        try:
            usable = SamplingParams(**more)
        except InputError as error:
            logger.warning("a sampling setting of model %s is ignored: %s", model, error)
        else:
            settings = more
    return usable
