"""Frequencies of rotary positions, from the parameters of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.loader.fields import Fields
from tokenswift.loader.positions import ROTATED_SHARE, TRAINED_LENGTH
from tokenswift.types import InputError

#: kinds whose frequencies are computed here
KINDS = ("default", "linear", "llama3", "yarn")


def longrope_frequencies(
    rope: Mapping[str, object], name: str, pairs: int
) -> Float[Tensor, " pairs"]:
    """LongRoPE's frequencies by one of its two lists of factors, float32.

    Raises:
        InputError: the list has another length.
    """
    fields = Fields(rope, "the model's rope_parameters")
    factors = fields.numbers(name)
    if len(factors) != pairs:
        raise InputError(
            f"the model's rope_parameters.{name} has {len(factors)} numbers; valid: {pairs}, "
            "one for each pair of a head's numbers that positions rotate"
        )
    exponents = torch.arange(0, 2 * pairs, 2).float() / (2 * pairs)
    powers = fields.number("rope_theta") ** exponents
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)


def longrope_magnitude(rope: Mapping[str, object], positions: float) -> float:
    """What LongRoPE multiplies the cosines and sines of all texts with, short ones too.

    Args:
        positions: of the whole model.
    """
    fields = Fields(rope, "the model's rope_parameters")
    trained = fields.number(TRAINED_LENGTH)
    factor = fields.number("factor", positions / trained)
    magnitude = 1.0
    if factor > 1 and trained > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained))
    return float(fields.number("attention_factor", magnitude))


def frequencies_of(rope: Mapping[str, Any], width: int, double: bool) -> tuple[Tensor, float]:
    """Frequencies of a set of parameters, (d / 2,) float32, and the factor of cosines and sines."""
    kind = rope["rope_type"]
    theta = rope["rope_theta"]
    if kind == "yarn":
        return _yarn(rope, width)
    if kind == "default" and double:
        exponents = [place / width for place in range(0, width, 2)]
        powers = torch.tensor([float(theta) ** exponent for exponent in exponents]).float()
    else:
        powers = theta ** (torch.arange(0, width, 2).float() / width)
    frequencies = 1.0 / powers
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    raise InputError(f"the model's rotary embedding is of type {kind!r}; valid: {', '.join(KINDS)}")


def _yarn(rope: Mapping[str, Any], width: int) -> tuple[Tensor, float]:
    """YaRN's frequencies and factor, by transformers' own function."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = SimpleNamespace(
        rope_parameters={name: value for name, value in rope.items() if name != ROTATED_SHARE},
        head_dim=width,
        hidden_size=width,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    try:
        return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    except ArithmeticError as error:  # a theta of 1, or turns beyond floats
        raise InputError(
            f"the model's rope_parameters cannot be used ({error}); valid: those of a working "
            "checkpoint"
        ) from error


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3's: slow pairs are divided by a factor, fast ones are left, those between are
    mixed."""
    factor = rope["factor"]
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    trained = rope[TRAINED_LENGTH]
    length = 2 * math.pi / frequencies  # positions until a pair comes round
    slow = length > trained / low
    fast = length < trained / high
    divided = torch.where(slow, frequencies / factor, frequencies)
    share = (trained / length - low) / (high - low)
    mixed = (1 - share) * divided / factor + share * divided
    return torch.where(~fast & ~slow, mixed, divided)
