"""The rotary positions of a model, from its config; longer contexts by YaRN leave the model object
as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenswift.config.loading import STATED_POSITIONS, RopeScaling
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import FULL, SLIDING
from tokenswift.loader.frequencies import (
    KINDS,
    frequencies_of,
    longrope_frequencies,
    longrope_magnitude,
)
from tokenswift.loader.layout import HeadsConfig, head_width, rotated_width
from tokenswift.loader.positions import QUERY_SCALE, TRAINED_LENGTH
from tokenswift.loader.rotary import QueryScale, Rotary
from tokenswift.types import InputError

#: kinds whose frequencies depend on the length of the text that a pass sees: a tree would reach a
#: boundary before the text does, so another text would come out
BY_LENGTH = ("dynamic", "longrope")
#: parameters of positions that all models of transformers compute alike
PLAIN = {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
PLAIN |= {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
PLAIN |= {"truncate", "mscale", "mscale_all_dim"}


def context_limit(config: object) -> int | None:
    """The number of positions that a transformers config allows, its own scaling included; None: no
    limit.

    ``max_position_embeddings`` counts the factor of Llama 3's rule. That of YaRN it counts in some
    files and not in others, and it surely does where they do not say which length the factor
    extends (`loader.positions.counts_factor`).
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") != "yarn" or getattr(config, "counts_factor", False):
        return limit
    original = rope.get(TRAINED_LENGTH) or limit
    return max(limit, int(original * rope.get("factor", 1)))


C = TypeVar("C")


def scaled_config(config: C, scaling: RopeScaling | None) -> C:
    """The config with YaRN by a factor: a copy, or the config itself where nothing changes.

    A config with YaRN of its own keeps its parameters; its factor is multiplied.

    Raises:
        InputError: the model scales its positions by another method than YaRN.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if scaling is None or limit is None:
        return config
    at_least = max(1.0, STATED_POSITIONS / (context_limit(config) or limit))
    factor = scaling.factor or 2.0 ** math.ceil(math.log2(at_least))
    if factor == 1:
        return config
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    by_layer = any(isinstance(value, dict) for value in rope.values())
    if kind not in ("default", "yarn") or by_layer:
        raise InputError(
            "rope_scaling yarn does not fit this model, which already scales its positions "
            f"({kind}); valid: none"
        )
    original = rope.get(TRAINED_LENGTH) or limit
    total = float(factor) * rope.get("factor", 1.0)
    extended = original * total
    if getattr(config, "counts_factor", False):
        extended = limit * float(factor)
    rope["rope_type"] = "yarn"
    rope["factor"] = total
    rope[TRAINED_LENGTH] = original
    # belongs to the old factor; without it YaRN computes its own
    rope.pop("attention_factor", None)
    scaled: Any = copy.deepcopy(config)
    scaled.rope_parameters = rope
    scaled.max_position_embeddings = int(extended)
    return scaled


def positions_name(body: object) -> str | None:
    """What the position embedding of a transformers model's body is called; None: it has none."""
    return next((name for name in ("rotary_emb", "pos_emb") if hasattr(body, name)), None)


def rotary_of(model: Any, scaling: RopeScaling | None = None) -> Rotary:
    """The rotary positions of a transformers causal LM, extended if wished; the model is not
    changed.

    Raises:
        InputError: a kind that depends on the text's length, or one that YaRN does not fit.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    is_native = model.config.model_type in FAMILIES
    for part in (rope, *rope.values()):
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if kind in BY_LENGTH and not (is_native and kind == "longrope"):
            raise by_length(kind)
    if is_native and (FULL in rope or not rope.keys() <= PLAIN):
        return rotary_of_config(model.config, scaling)
    config = scaled_config(model.config, scaling)
    module = getattr(model.model, positions_name(model.model) or "rotary_emb")
    if config is not model.config:
        module = type(module)(config=config).to(module.inv_freq.device)
    frequencies = getattr(module, "inv_freq", None)
    if frequencies is not None:
        frequencies = frequencies.detach().float().clone()
    factor = float(getattr(module, "attention_scaling", 1.0))
    return Rotary(frequencies, factor, context_limit(config), config)


class RopeConfig(HeadsConfig, Protocol):
    """A config of a native family, of `config.completed` or transformers', as far as positions
    depend on it."""

    @property
    def rope_parameters(self) -> Mapping[str, Any]:
        """Positions by the names of transformers' configs."""
        ...


def by_length(kind: str) -> InputError:
    """The error of positions that transformers' own forward cannot run here."""
    return InputError(
        f"the model's rotary embedding is of type {kind}, whose frequencies change with the length "
        f"of the text; valid: {', '.join(KINDS)}"
    )


def rotary_of_config(
    config: RopeConfig, scaling: RopeScaling | None = None, double: bool = False
) -> Rotary:
    """The rotary positions of a native family's model from its config alone, without modelling
    code; bit for bit those that transformers computes.

    Args:
        double: unscaled frequencies are computed in float64 and rounded, as those of GGUF files
            always were; transformers computes in float32, where one in a hundred may differ in its
            last bit.
    Raises:
        InputError: a kind that depends on the text's length, or one that YaRN does not fit.
    """
    config = scaled_config(config, scaling)
    rope = config.rope_parameters
    if FULL not in rope:
        return _rotary_of_all_layers(config, double)
    width = head_width(config)
    full, full_factor = frequencies_of(rope[FULL], width, double)
    sliding, sliding_factor = frequencies_of(rope[SLIDING], width, double)
    frequencies = torch.stack((full, sliding))
    return Rotary(frequencies, (full_factor, sliding_factor), context_limit(config), config)


def _rotary_of_all_layers(config: RopeConfig, double: bool) -> Rotary:
    """Positions that are the same in all layers."""
    rope = config.rope_parameters
    limit = context_limit(config)
    half = head_width(config) // 2
    pairs = rotated_width(config) // 2
    long: Tensor | None = None
    if rope["rope_type"] == "longrope":
        frequencies = longrope_frequencies(rope, "short_factor", pairs)
        long = _at_rest(longrope_frequencies(rope, "long_factor", pairs), half)
        scaling = longrope_magnitude(rope, limit or rope[TRAINED_LENGTH])
    else:
        frequencies, scaling = frequencies_of(rope, 2 * pairs, double)
    beta = rope.get(QUERY_SCALE)
    return Rotary(
        _at_rest(frequencies, half),
        scaling,
        limit,
        config,
        pairs=None if pairs == half else pairs,
        long=long,
        short_limit=None if long is None else rope[TRAINED_LENGTH],
        query_scale=None if beta is None else QueryScale(beta, rope[TRAINED_LENGTH]),
    )


def _at_rest(frequencies: Float[Tensor, " pairs"], half: int) -> Float[Tensor, " half"]:
    """Frequencies of all pairs of a head: those that positions do not rotate have 0."""
    return F.pad(frequencies, (0, half - len(frequencies)))
