"""Longer contexts than a model was trained for: YaRN on an already loaded model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tokenswift.types import InputError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A wish for YaRN.

    Attributes:
        factor: how many times the model's positions; None is the smallest power of two that fits the need.
    """

    factor: float | None


def parse_rope_scaling(text: str) -> RopeScaling | None:
    """Read ``"none"`` (→ None), ``"yarn"`` or ``"yarn:FACTOR"``.

    Raises:
        InputError: for anything else, or a factor below 1.
    """
    if text == "none":
        return None
    kind, colon, number = text.partition(":")
    if kind == "yarn" and not colon:
        return RopeScaling(None)
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind != "yarn" or not math.isfinite(factor) or factor < 1:
        raise InputError(
            f"rope_scaling is {text!r}; valid: none, yarn, yarn:FACTOR with a factor of at least 1 (yarn:4)"
        )
    return RopeScaling(factor)


def needed_factor(limit: int, tokens: int) -> float:
    """The smallest power of two that makes ``limit`` positions hold ``tokens`` tokens."""
    factor = 1.0
    while limit * factor < tokens:
        factor *= 2
    return factor


def context_limit(config: Any) -> int | None:
    """The number of positions that a transformers config allows, its own scaling included; None: no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is not None and rope.get("rope_type") in ("yarn", "llama3"):
        original = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * rope.get("factor", 1)))
    return limit


def extend_context(model: Any, factor: float) -> int | None:
    """Make a loaded model take ``factor`` times the positions that it was loaded with, by YaRN.

    Always relative to the model as it was loaded: calling it again replaces the last factor, and 1 puts
    everything back. A model loaded with YaRN keeps its parameters; its factor is multiplied.

    Args:
        model: a transformers causal LM with one rotary embedding at ``model.model.rotary_emb``.
        factor: at least 1.
    Returns:
        The new number of positions (None: the model has no limit, and nothing was changed).
    Raises:
        InputError: bad factor, or the model already scales its positions by another method than YaRN.
    """
    if not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 1:
        raise InputError(f"rope_scaling factor is {factor!r}; valid: a number of at least 1")
    config, rotary = model.config, model.model.rotary_emb
    loaded = getattr(rotary, "tokenswift_loaded", None)
    parameters, limit = loaded or (dict(config.rope_parameters), config.max_position_embeddings)
    if limit is None or (factor == 1 and loaded is None):
        return context_limit(config)
    kind = parameters.get("rope_type", "default")
    if factor != 1 and kind not in ("default", "yarn"):
        raise InputError(
            f"rope_scaling yarn does not fit this model, which already scales its positions ({kind}); "
            "valid: none"
        )
    wanted, positions = dict(parameters), limit
    if factor != 1:
        original = parameters.get("original_max_position_embeddings") or limit
        total = float(factor) * parameters.get("factor", 1.0)
        wanted |= {"rope_type": "yarn", "factor": total, "original_max_position_embeddings": original}
        wanted.pop("attention_factor", None)  # it belongs to the old factor; without it YaRN computes its own
        positions = int(original * total)
    if (config.rope_parameters, config.max_position_embeddings) != (wanted, positions):
        config.rope_parameters, config.max_position_embeddings = wanted, positions
        rebuilt = type(rotary)(config=config).to(rotary.inv_freq.device)
        rebuilt.tokenswift_loaded = (parameters, limit)
        model.model.rotary_emb = rebuilt
    return context_limit(config)
