"""Rotary positions as a GGUF file states them."""

from __future__ import annotations

import math

import torch

from tokenswift.loader.dense_families import LLAMA
from tokenswift.loader.family import FULL, SLIDING, Family
from tokenswift.loader.frequencies import longrope_magnitude
from tokenswift.loader.gguf import GgufFile, short
from tokenswift.loader.gguf_names import (
    FACTORS,
    LONGROPE,
    NUMBER_KEYS,
)
from tokenswift.loader.positions import QUERY_SCALE, ROTATED_SHARE, TRAINED_LENGTH
from tokenswift.loader.schema import MOST_HEAD, check_numbers, refusal
from tokenswift.loader.weights import unstored
from tokenswift.types import InputError

#: Llama 3's rule: wavelengths between these parts of the first model's positions are scaled in part
LOW = 1.0
HIGH = 4.0
TRAINED = 8192
#: parameters of YaRN that may be left out
YARN = ("beta_fast", "beta_slow", TRAINED_LENGTH)


def positions(file: GgufFile, width: int, family: Family = LLAMA) -> dict[str, object]:
    """``rope_parameters`` as transformers' configs have them; of YaRN what the file says.

    Args:
        width: of a head.
        family: of the model.
    Raises:
        InputError: the file scales positions in a way that is not known here.
    """
    if not file.tensors.keys().isdisjoint(LONGROPE.values()):
        return _longrope(file)
    key = f"{file.architecture}.rope.scaling"
    rule = "none" if FACTORS in file.tensors else file.metadata.get(f"{key}.type", "none")
    if rule not in ("none", "linear", "yarn"):
        raise refusal(file.where, f"{key}.type", rule, f"none, linear, yarn, or tensor {FACTORS}")
    theta = file.number("rope.freq_base", None if family.rope else 10000.0)
    rope: dict[str, object] = {
        "rope_theta": theta,
        "rope_type": "default" if rule == "none" else rule,
    }
    if rule != "none":
        rope["factor"] = file.number("rope.scaling.factor")
    if rule == "yarn":
        rope = {**family.rope, **rope}
        for name in YARN:
            value = file.number(NUMBER_KEYS[f"rope_parameters.{name}"], 0)
            if value:
                rope[name] = value
        if QUERY_SCALE in family.rope_fields:
            rope.update(_ministral3(file))
    attention_factor = file.number("rope.scaling.attn_factor", 1)
    if attention_factor not in (0, 1):
        if rule != "yarn" or file.architecture != "olmo2":  # elsewhere it means something else
            valid = "1, or a file without it"
            raise refusal(file.where, f"{key}.attn_factor", attention_factor, valid)
        rope["attention_factor"] = attention_factor
    check_numbers({"rope_parameters": rope}, file.where, file.full_keys())
    if FACTORS in file.tensors:
        rope.update(_llama3(file, width, theta))
    return rope


def _longrope(file: GgufFile) -> dict[str, object]:
    """LongRoPE's parameters: its lists are tensors.

    Raises:
        InputError: one of the lists is missing or no list, or a number is wrong.
    """
    rope: dict[str, object] = {
        "rope_type": "longrope",
        "rope_theta": file.number("rope.freq_base", 10000.0),
        TRAINED_LENGTH: file.number(NUMBER_KEYS[f"rope_parameters.{TRAINED_LENGTH}"]),
    }
    for name, tensor in LONGROPE.items():
        place = file.tensors.get(tensor)
        if place is None or len(place.shape) != 1 or place.shape[0] > MOST_HEAD:
            shape = None if place is None else place.shape
            raise refusal(file.where, tensor, shape, "a list of factors, beside the other one")
        rope[name] = [short(value) for value in unstored(file[tensor], torch.float32).tolist()]
    stated = file.number("rope.scaling.attn_factor", 0)
    check_numbers({"rope_parameters": rope}, file.where, file.full_keys())
    magnitude = longrope_magnitude(rope, file.number(NUMBER_KEYS["max_position_embeddings"]))
    if stated and not math.isclose(stated, magnitude, rel_tol=1e-5):
        rope["attention_factor"] = stated
        check_numbers({"rope_parameters": rope}, file.where, file.full_keys())
    return rope


def _ministral3(file: GgufFile) -> dict[str, object]:
    """What Ministral 3 has besides YaRN: how queries grow, and its magnitude, of which files say
    the half."""
    half = file.number(NUMBER_KEYS["rope_parameters.mscale_all_dim"], 1.0)
    return {
        QUERY_SCALE: file.number(NUMBER_KEYS[f"rope_parameters.{QUERY_SCALE}"]),
        "mscale": 1.0,
        "mscale_all_dim": half,
    }


def _rotated_share(file: GgufFile, width: int) -> float:
    """Which share of a head positions rotate.

    Raises:
        InputError: it is no part of a head.
    """
    rotated = file.number("rope.dimension_count", width)
    share = rotated / width
    if not 0 < share <= 1 or rotated % 2 or int(width * share) != rotated:
        key = f"{file.architecture}.rope.dimension_count"
        raise refusal(file.where, key, rotated, f"an even number up to {width}, the head's width")
    return share


def _llama3(file: GgufFile, width: int, theta: float) -> dict[str, object]:
    """Llama 3's rule from the factors that it gave.

    Raises:
        InputError: no such rule gives them.
    """
    factors = unstored(file[FACTORS], torch.float32).double()
    if factors.shape == (width // 2,) and bool(((factors >= 1) & (factors < 1e6)).all()):
        factor = short(float(factors.max()))
        waves = 2 * math.pi * theta ** (torch.arange(0, width, 2).double() / width)
        smooth = ((TRAINED / waves - LOW) / (HIGH - LOW)).clamp(0, 1)
        if torch.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                TRAINED_LENGTH: TRAINED,
            }
    raise InputError(
        f"{file.where}: {FACTORS} does not follow Llama 3's rule; valid: factors that do"
    )


def positions_of(file: GgufFile, family: Family, width: int) -> dict[str, object]:
    """``rope_parameters`` of all layers, by their kinds where there are two."""
    rope = positions(file, width, family)
    if ROTATED_SHARE in family.rope_fields:
        rope[ROTATED_SHARE] = _rotated_share(file, width)
    if len(family.rope_bases) == 1:
        return rope
    # a file says at most the base of layers with windows
    full_base, sliding_base = family.rope_bases
    base = rope["rope_theta"] if full_base == sliding_base else sliding_base
    default = base if isinstance(base, int | float) else sliding_base
    theta = file.number("rope.freq_base_swa", default)
    sliding: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    check_numbers({"rope_parameters": sliding}, file.where, file.full_keys())
    return {FULL: rope, SLIDING: sliding}
