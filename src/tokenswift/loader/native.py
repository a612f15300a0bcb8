"""What config.json and generation_config.json say of a model of the native decoder's families, read as JSON.

A config leaves out what its family has by default. :func:`completed` fills that in as transformers does, so
that the digest of a config (`identity.config_digest`) is the same whoever read it. Whatever is not known to
be taken as it stands (a field, a value of another type, positions of another kind) is left to transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenswift.json_files import MOST_CONFIG, object_in
from tokenswift.loader.checkpoint import Layout, head_width

#: fields of every family and their defaults
COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "architectures": None,
    "pad_token_id": None,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA: dict[str, Any] = {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "head_dim": None}
#: those of each family
OWN: dict[str, dict[str, Any]] = {
    "llama": {
        **_LLAMA,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "pretraining_tp": 1,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
}
#: what no file sets here, as transformers writes it into every config
FIXED: dict[str, Any] = {
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "id2label": {0: "LABEL_0", 1: "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "problem_type": None,
}
#: fields that say nothing of the forward pass; those of the second kind are no part of what a config says
ASIDE = ("is_llama_config", "rope_interleaved", "transformers.js_config", "unk_token_id", "use_mrope")
ASIDE += ("_model_name_or_path", "unsloth_version", "unsloth_fixed")
DROPPED = ("model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype")
DROPPED += ("rope_theta", "rope_scaling", "rope_parameters")
DROPPED += ("do_sample", "eta_cutoff", "max_length", "repetition_penalty", "temperature", "top_k", "top_p")
_Int, _Number, _Ids = (int, type(None)), (int, float), (int, list, type(None))
#: types of values, where a default of None or of another number does not say them
TYPES: dict[str, tuple[type, ...]] = {
    "architectures": (list, type(None)),
    "attention_dropout": _Number,
    "bos_token_id": _Int,
    "eos_token_id": _Ids,
    "initializer_range": (float,),
    "layer_types": (list, type(None)),
    "num_key_value_heads": _Int,
    "pad_token_id": _Int,
    "sliding_window": _Int,
}
#: fields of each kind of positions besides its name and theta: those it needs, and those it may have
ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
THETA = 10_000.0
FULL, SLIDING = "full_attention", "sliding_attention"


class NativeConfig(SimpleNamespace):
    """A config with the attributes of transformers' own."""

    def to_dict(self) -> dict[str, Any]:
        """What it says, as transformers' ``to_dict`` gives it; the type of the weights is left out."""
        return copy.deepcopy({k: v for k, v in vars(self).items() if k != "dtype"} | FIXED)

    def of_transformers(self) -> Any:
        """The same as transformers has it, a ``PretrainedConfig``."""
        from transformers import AutoConfig

        said = {k: v for k, v in vars(self).items() if k != "model_type"}
        return AutoConfig.for_model(self.model_type, **copy.deepcopy(said))


def completed(kind: str, said: Mapping[str, Any]) -> NativeConfig | None:
    """The config of a family, of what a file says and the family's defaults.

    Args:
        kind: the family.
        said: fields of the file, whose numbers were checked (`numbers.check_numbers`).
    Returns:
        None where transformers may understand it otherwise.
    """
    usual = COMMON | OWN[kind]
    more = {"head_dim": None} if kind == "qwen2" else {}  # read without a default
    known = usual | more
    if not said.keys() <= {*known, *ASIDE, *DROPPED}:
        return None
    given = {key: value for key, value in said.items() if key not in DROPPED}
    if not all(_fits(key, value, known[key]) for key, value in given.items() if key in known):
        return None
    fields = copy.deepcopy(usual | given)
    if kind in ("llama", "mistral") and fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or fields["num_attention_heads"]
    rope = positions_said(said, fields["max_position_embeddings"])
    if rope is None or fields["hidden_act"] != "silu" or not _is_whole(kind, fields):
        return None
    if "layer_types" in usual and not _take_layer_types(fields):
        return None
    dtype = said.get("dtype") or said.get("torch_dtype")
    return NativeConfig(**fields, rope_parameters=rope, model_type=kind, dtype=dtype)


def _fits(key: str, value: object, usual: object) -> bool:
    """Whether a value is of the type that a field has."""
    kinds = TYPES.get(key)
    if kinds is None:
        kinds = (int,) if usual is None else (type(usual),)
    if isinstance(value, list):
        kind = int if key == "eos_token_id" else str
        return list in kinds and all(type(one) is kind for one in value)
    return type(value) in kinds


def _is_whole(kind: str, fields: Mapping[str, Any]) -> bool:
    """Whether the class is a causal language model's, and transformers has models of such sizes."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    names = fields["architectures"] or ("ForCausalLM",)
    return (
        (kind != "llama" or hidden % heads == 0)
        and 0 <= fields["initializer_range"] <= 1
        and any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    )


def _take_layer_types(fields: dict[str, Any]) -> bool:
    """Fill in which layers of a Qwen model see a window; False where the file names others."""
    layers, first = fields["num_hidden_layers"], fields["max_window_layers"]
    if not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    if fields["layer_types"] is None:
        windowed = fields["sliding_window"] is not None
        fields["layer_types"] = [SLIDING if windowed and n >= first else FULL for n in range(layers)]
    return len(fields["layer_types"]) == layers and set(fields["layer_types"]) <= {FULL, SLIDING}


def positions_said(said: Mapping[str, Any], limit: int) -> dict[str, Any] | None:
    """``rope_parameters`` of what a file says, of older ones too."""
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return None
    rope = dict(rope)
    rope.setdefault("rope_theta", said.get("rope_theta", THETA))
    rope.setdefault("rope_type", rope.get("type", "default"))
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in ROPES:
        return None
    needed, more = ROPES[kind]
    there = rope.keys() - {"rope_type", "type", "rope_theta"}
    numbers = [rope["rope_theta"], *(rope[name] for name in there if name != "truncate")]
    if not (set(needed) <= there <= {*needed, *more}) or any(type(n) not in _Number for n in numbers):
        return None
    if type(rope.get("truncate", True)) is not bool:
        return None
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", limit)
    return rope


def layout_of(config: Any, tied: bool | None = None) -> Layout:
    """What the native decoder is made of.

    Args:
        config: of one of its families, a :class:`NativeConfig` or transformers'.
        tied: whether the LM head is the embedding; None: as the config says.
    """
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or [SLIDING] * layers
    if config.model_type == "llama":
        window = 0
    width = head_width(config)
    return Layout(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=width,
        eps=float(config.rms_norm_eps),
        scale=float(width**-0.5),
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        tied=bool(config.tie_word_embeddings) if tied is None else tied,
    )


def weight_names(config: Any, layout: Layout) -> set[str]:
    """The names of all weights that transformers' model of a config has."""
    kind = config.model_type
    has: dict[str, bool] = {
        "self_attn": kind == "qwen2" or bool(getattr(config, "attention_bias", False)),
        "mlp": kind == "llama" and bool(config.mlp_bias),
    }
    biases = {name for name in layout.biases() if has[name.split(".")[3]]}
    return layout.shapes().keys() | biases


def read_generation(folder: Path, name: str) -> dict[str, Any] | None:
    """What a model's generation_config.json says; None where there is none.

    Raises:
        InputError: it is no JSON object.
    """
    path = folder / "generation_config.json"
    return object_in(path, MOST_CONFIG, f"model {name}") if path.exists() else None
