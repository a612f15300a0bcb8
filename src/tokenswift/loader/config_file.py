"""The config.json of a model's folder: read, and refused where it cannot be a model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenswift.checks import shown
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.bounds import check_bounds
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import FULL, REQUIRED, SLIDING
from tokenswift.loader.find import ADAPTER, MERGED
from tokenswift.loader.multimodal import is_wrapper, text_config
from tokenswift.loader.schema import ROPES, check_numbers, refusal
from tokenswift.types import InputError

#: what runs
SUPPORTED = "causal language models with rotary positions, such as Llama, Qwen or Mistral"
#: ends of the names of causal language models' classes
CAUSAL = ("ForCausalLM", "LMHeadModel")
#: formats of quantized checkpoints that are not read
QUANTIZED = ("gptq", "awq", "compressed-tensors")


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
