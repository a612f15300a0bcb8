"""Rotary positions of a model, as a value: longer contexts by YaRN leave the model object as it
was."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.config.loading import STATED_POSITIONS, RopeScaling
from tokenswift.loader.families import FAMILIES, FULL, SLIDING
from tokenswift.loader.layout import head_width
from tokenswift.types import InputError

#: kinds whose frequencies depend on the length of the text that a pass sees: a tree would reach a
#: boundary before the text does, so another text would come out
BY_LENGTH = ("dynamic", "longrope")
#: kinds whose frequencies are computed here
KINDS = ("default", "linear", "llama3", "yarn")
BLOCK = 1024  # positions whose angles are computed together


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies and positions of a model.

    Attributes:
        frequencies: angle per position of each pair of a head's dimensions, (d / 2,) float32, or
            (2, d / 2) of layers that see everything and of those with windows; None where only the
            model's code knows.
        scaling: factor of cosines and sines (YaRN's attention factor), one or of each set.
        limit: positions that may be used; None: no limit.
        config: the config that says so, a copy where it differs from the model's own.
    """

    frequencies: Float[Tensor, "*sets half"] | None
    scaling: float | tuple[float, ...]
    limit: int | None
    config: Any

    def single(self) -> Float[Tensor, " half"]:
        """The frequencies of all layers.

        Raises:
            InputError: the layers have several sets of frequencies.
        """
        if self.frequencies is None or self.frequencies.dim() > 1:
            raise InputError(
                "the model has several sets of rotary frequencies; valid: one for all layers"
            )
        return self.frequencies

    def to(self, device: torch.device | str) -> Rotary:
        """The same with its frequencies on a device."""
        return replace(
            self, frequencies=None if self.frequencies is None else self.frequencies.to(device)
        )

    def angles(
        self, positions: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "*sets n half"], Float[Tensor, "*sets n half"]]:
        """Cosines and sines of each position.

        Raises:
            InputError: the frequencies are not known.
        """
        found = self.single() if self.frequencies is None else self.frequencies
        angle = positions[:, None].float() * found[..., None, :]
        cos, sin = cos_sin(angle) if angle.device.type == "cpu" else (angle.cos(), angle.sin())
        if self.scaling == 1.0:
            return cos, sin
        if isinstance(
            self.scaling, tuple
        ):  # as numbers: a device would be waited for that takes a tensor
            sets = [
                [x * by for x, by in zip(part, self.scaling, strict=True)] for part in (cos, sin)
            ]
            return torch.stack(sets[0]), torch.stack(sets[1])
        return cos * self.scaling, sin * self.scaling


class AngleTable:
    """Cosines and sines of positions that are asked for again and again: on the CPU each is
    computed once.

    They are taken out by numpy: torch would start its threads for these few numbers, which then
        spin beside
    ours. On an accelerator nobody waits for the positions to come here.
    """

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary
        self._known: tuple[Any, Any] = (None, None)  # (sets, m, half) arrays each, or (m, half)

    def at(
        self, positions: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "*sets n half"], Float[Tensor, "*sets n half"]]:
        """See :meth:`Rotary.angles`."""
        if positions.device.type != "cpu":
            return self.rotary.angles(positions)
        at, (cos, sin) = positions.numpy(), self._known
        known = 0 if cos is None else cos.shape[-2]
        if known <= (newest := int(at.max())):
            more = torch.arange(known, (newest // BLOCK + 1) * BLOCK)
            made = [part.numpy() for part in self.rotary.angles(more)]
            if cos is not None:
                made = [np.concatenate(pair, -2) for pair in zip((cos, sin), made, strict=True)]
            self._known = made[0], made[1]
        cos, sin = self._known
        return torch.from_numpy(cos.take(at, -2)), torch.from_numpy(sin.take(at, -2))


#: π / 2 in three parts; the first two have so few bits that their products with quarter turns are
#: exact
_QUARTER = (1.5707963267341256, 6.0771005063039659e-11, 2.0222662487959506e-21)


def cos_sin(angle: Float[Tensor, "*s"]) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Cosines and sines of float32 angles, rounded to float32, on the CPU.

    By sums and products in float64 alone, so that they are the same on every processor; those of
    torch and of systems' libraries are not.
    """
    x = angle.double().numpy()
    turns = np.rint(x * (2 / math.pi))
    r = ((x - turns * _QUARTER[0]) - turns * _QUARTER[1]) - turns * _QUARTER[2]
    z = r * r
    sin, cos = np.ones_like(r), np.ones_like(r)
    for n in range(17, 1, -2):  # their series; the next terms are below 1e-18
        sin = 1 - sin * z / (n * (n - 1))
        cos = 1 - cos * z / ((n - 1) * (n - 2))
    sin = r * sin
    quarter = turns.astype(np.int64) & 3
    odd = (quarter & 1).astype(bool)
    found = (np.where(odd, sin, cos), np.where(odd, cos, sin))
    signs = (
        np.where((quarter == 1) | (quarter == 2), -1.0, 1.0),
        np.where(quarter >= 2, -1.0, 1.0),
    )
    made = [
        torch.from_numpy((value * sign).astype(np.float32))
        for value, sign in zip(found, signs, strict=True)
    ]
    return made[0], made[1]


def context_limit(config: Any) -> int | None:
    """The number of positions that a transformers config allows, its own scaling included; None: no
    limit.

    ``max_position_embeddings`` counts the factor of Llama 3's rule. That of YaRN it counts in some
    files and not in others, and it surely does where they do not say which length the factor
    extends (`loader.config.counts_factor`).
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") != "yarn" or getattr(config, "counts_factor", False):
        return limit
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(original * rope.get("factor", 1)))


def scaled_config(config: Any, scaling: RopeScaling | None) -> Any:
    """The config with YaRN by a factor: a copy, or the config itself where nothing changes.

    A config with YaRN of its own keeps its parameters; its factor is multiplied.

    Raises:
        InputError: the model scales its positions by another method than YaRN.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if scaling is None or limit is None:
        return config
    least = max(1.0, STATED_POSITIONS / (context_limit(config) or limit))
    factor = scaling.factor or 2.0 ** math.ceil(math.log2(least))
    if factor == 1:
        return config
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "yarn") or any(
        isinstance(value, dict) for value in parameters.values()
    ):
        raise InputError(
            f"rope_scaling yarn does not fit this model, which already scales its positions "
            f"({kind}); "
            "valid: none"
        )
    original = parameters.get("original_max_position_embeddings") or limit
    total = float(factor) * parameters.get("factor", 1.0)
    extended = original * total
    if getattr(config, "counts_factor", False):
        extended = limit * float(factor)
    parameters |= {
        "rope_type": "yarn",
        "factor": total,
        "original_max_position_embeddings": original,
    }
    parameters.pop(
        "attention_factor", None
    )  # it belongs to the old factor; without it YaRN computes its own
    scaled = copy.deepcopy(config)
    scaled.rope_parameters, scaled.max_position_embeddings = parameters, int(extended)
    return scaled


def rotary_of(model: Any, scaling: RopeScaling | None = None) -> Rotary:
    """The rotary positions of a transformers causal LM, extended if wished; the model is not
    changed.

    Raises:
        InputError: a kind that depends on the text's length, or one that YaRN does not fit.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    for kind in (
        part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, Mapping)
    ):
        if kind in BY_LENGTH:
            raise InputError(
                f"the model's rotary embedding is of type {kind}, whose frequencies change with "
                f"the length "
                f"of the text; valid: {', '.join(KINDS)}"
            )
    if model.config.model_type in FAMILIES and FULL in rope:
        return rotary_of_config(model.config, scaling)
    config, module = scaled_config(model.config, scaling), model.model.rotary_emb
    if config is not model.config:
        module = type(module)(config=config).to(module.inv_freq.device)
    frequencies = getattr(module, "inv_freq", None)
    if frequencies is not None:
        frequencies = frequencies.detach().float().clone()
    return Rotary(
        frequencies, float(getattr(module, "attention_scaling", 1.0)), context_limit(config), config
    )


def rotary_of_config(
    config: Any, scaling: RopeScaling | None = None, double: bool = False
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
    width = head_width(config)
    parts = [rope[kind] for kind in (FULL, SLIDING)] if FULL in rope else [rope]
    found = [_frequencies(part, width, double) for part in parts]
    if len(found) == 1:
        return Rotary(*found[0], context_limit(config), config)
    sets, factors = zip(*found, strict=True)
    return Rotary(torch.stack(sets), factors, context_limit(config), config)


def _frequencies(rope: Mapping[str, Any], width: int, double: bool) -> tuple[Tensor, float]:
    """Frequencies of a set of parameters, (d / 2,) float32, and the factor of cosines and sines."""
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], 1.0
    if kind == "default" and double:
        powers = torch.tensor(
            [float(theta) ** (place / width) for place in range(0, width, 2)]
        ).float()
    else:
        powers = theta ** (torch.arange(0, width, 2).float() / width)
    found = 1.0 / powers
    if kind == "linear":
        found /= rope["factor"]
    elif kind == "llama3":
        found = _llama3(found, rope)
    elif kind == "yarn":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        given: Any = SimpleNamespace(rope_parameters=rope, head_dim=width, hidden_size=width)
        given.num_attention_heads, given.standardize_rope_params = 1, lambda: None
        try:
            found, factor = ROPE_INIT_FUNCTIONS["yarn"](given, torch.device("cpu"))
        except ArithmeticError as error:  # a theta of 1, or turns beyond floats
            raise InputError(
                f"the model's rope_parameters cannot be used ({error}); valid: those of a "
                f"working checkpoint"
            ) from error
    elif kind != "default":
        raise InputError(
            f"the model's rotary embedding is of type {kind!r}; valid: {', '.join(KINDS)}"
        )
    return found, factor


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3's: slow pairs are divided by a factor, fast ones are left, those between are
    mixed."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    trained = rope["original_max_position_embeddings"]
    length = 2 * math.pi / frequencies  # positions until a pair comes round
    slow, fast = length > trained / low, length < trained / high
    divided = torch.where(slow, frequencies / factor, frequencies)
    share = (trained / length - low) / (high - low)
    mixed = (1 - share) * divided / factor + share * divided
    return torch.where(~fast & ~slow, mixed, divided)
