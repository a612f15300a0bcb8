"""Rotary positions of a model, as a value: longer contexts by YaRN leave the model object as it
was."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from tokenswift.config.loading import STATED_POSITIONS, RopeScaling
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import FULL, SLIDING
from tokenswift.loader.fields import Fields
from tokenswift.loader.layout import HeadsConfig, head_width, rotated_width
from tokenswift.loader.positions import QUERY_SCALE, ROTATED_SHARE, TRAINED_LENGTH
from tokenswift.types import InputError

#: kinds whose frequencies depend on the length of the text that a pass sees: a tree would reach a
#: boundary before the text does, so another text would come out
BY_LENGTH = ("dynamic", "longrope")
#: parameters of positions that all models of transformers compute alike
PLAIN = {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
PLAIN |= {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
PLAIN |= {"truncate", "mscale", "mscale_all_dim"}
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
        pairs: the pairs of a head that positions rotate, the first ones; None: all.
        long: LongRoPE's frequencies of texts that are longer than ``short_limit``, (d / 2,)
            float32; None: ``frequencies`` hold for all texts.
        short_limit: the longest text that ``frequencies`` hold for, where there are others.
        query_scale: how queries are scaled by their positions; None: not at all.
    """

    frequencies: Float[Tensor, "*sets half"] | None
    scaling: float | tuple[float, ...]
    limit: int | None
    config: Any
    pairs: int | None = None
    long: Float[Tensor, " half"] | None = None
    short_limit: int | None = None
    query_scale: QueryScale | None = None

    def single(self, is_long: bool = False) -> Float[Tensor, " half"]:
        """The frequencies of all layers.

        Args:
            is_long: those of long texts, where there are such.
        Raises:
            InputError: the layers have several sets of frequencies.
        """
        if self.frequencies is None or self.frequencies.dim() > 1:
            raise InputError(
                "the model has several sets of rotary frequencies; valid: one for all layers"
            )
        return self.long if is_long and self.long is not None else self.frequencies

    def to(self, device: torch.device | str) -> Rotary:
        """The same with its frequencies on a device."""
        if self.frequencies is None:
            return self
        long = None if self.long is None else self.long.to(device)
        return replace(self, frequencies=self.frequencies.to(device), long=long)

    def is_long(self, tokens: int) -> bool:
        """Whether a text of at most so many tokens, prompt included, has the frequencies of long
        texts. They are chosen once for a text, by what it may become."""
        return self.short_limit is not None and tokens > self.short_limit

    def of_long(self) -> Rotary | None:
        """The positions of long texts; None: they are those of all texts."""
        if self.long is None:
            return None
        return replace(self, frequencies=self.long, long=None, short_limit=None)

    def angles(
        self, positions: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "*sets n half"], Float[Tensor, "*sets n half"]]:
        """Cosines and sines of each position.

        Raises:
            InputError: the frequencies are not known.
        """
        frequencies = self.single() if self.frequencies is None else self.frequencies
        angle = positions[:, None].float() * frequencies[..., None, :]
        if angle.device.type == "cpu":
            cos, sin = cos_sin(angle)
        else:
            cos = angle.cos()
            sin = angle.sin()
        if self.scaling == 1.0:
            return cos, sin
        if isinstance(self.scaling, tuple):
            # one by one, as numbers: a device would be waited for that takes them as a tensor
            scaled_cos = [part * factor for part, factor in zip(cos, self.scaling, strict=True)]
            scaled_sin = [part * factor for part, factor in zip(sin, self.scaling, strict=True)]
            return torch.stack(scaled_cos), torch.stack(scaled_sin)
        cos[..., : self.pairs] *= self.scaling
        sin[..., : self.pairs] *= self.scaling
        return cos, sin


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries grow with their positions: by 1 + β log(1 + ⌊position / length⌋).

    Attributes:
        beta: β.
        length: positions of the first model.
    """

    beta: float
    length: int

    def at(self, positions: Int[Tensor, " n"]) -> Float[Tensor, " n"] | None:
        """The scale of each position, float32; None: all are 1.

        On the CPU by the logarithm in float64, so that it is the same on every processor.
        """
        if positions.device.type != "cpu":
            return 1 + self.beta * (positions // self.length + 1).float().log()
        steps = positions.numpy() // self.length
        if not steps.any():
            return None
        scales = [1 + self.beta * math.log1p(step) for step in steps.tolist()]
        return torch.tensor(scales, dtype=torch.float32)


class AngleTable:
    """Cosines and sines of positions that are asked for again and again: on the CPU each is
    computed once.

    They are taken out by numpy: torch would start its threads for these few numbers, which then
    spin beside ours. On an accelerator nobody waits for the positions to come here.

    Args:
        rotary: of the model.
    """

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary
        # cosines and sines, (sets, m, half) or (m, half) each; None: none are known yet
        self._known: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    def at(
        self, positions: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "*sets n half"], Float[Tensor, "*sets n half"]]:
        """See :meth:`Rotary.angles`."""
        if positions.device.type != "cpu":
            return self.rotary.angles(positions)
        places = positions.numpy()
        cos, sin = self._up_to(int(places.max()))
        return torch.from_numpy(cos.take(places, -2)), torch.from_numpy(sin.take(places, -2))

    def _up_to(self, newest: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of all positions up to one."""
        count = 0 if self._known is None else self._known[0].shape[-2]
        if self._known is not None and newest < count:
            return self._known
        more = torch.arange(count, (newest // BLOCK + 1) * BLOCK)
        more_cos, more_sin = self.rotary.angles(more)
        cos: NDArray[np.float32] = more_cos.numpy()
        sin: NDArray[np.float32] = more_sin.numpy()
        if self._known is not None:
            cos = np.concatenate((self._known[0], cos), -2)
            sin = np.concatenate((self._known[1], sin), -2)
        self._known = (cos, sin)
        return self._known


#: π / 2 in three parts; the first two have so few bits that their products with quarter turns are
#: exact
_QUARTER = (1.5707963267341256, 6.0771005063039659e-11, 2.0222662487959506e-21)


def cos_sin(angle: Float[Tensor, "*s"]) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Cosines and sines of float32 angles, rounded to float32, on the CPU.

    By sums and products in float64 alone, so that they are the same on every processor; those of
    torch and of systems' libraries are not.
    """
    x = angle.double().numpy()
    turns = np.rint(x * (2 / math.pi))  # quarters of a circle
    r = ((x - turns * _QUARTER[0]) - turns * _QUARTER[1]) - turns * _QUARTER[2]
    z = r * r
    sin = np.ones_like(r)
    cos = np.ones_like(r)
    for n in range(17, 1, -2):  # their series; the next terms are below 1e-18
        sin = 1 - sin * z / (n * (n - 1))
        cos = 1 - cos * z / ((n - 1) * (n - 2))
    sin = r * sin
    quarter = turns.astype(np.int64) & 3
    is_odd = (quarter & 1).astype(bool)
    cos_sign = np.where((quarter == 1) | (quarter == 2), -1.0, 1.0)
    sin_sign = np.where(quarter >= 2, -1.0, 1.0)
    full_cos = np.where(is_odd, sin, cos) * cos_sign
    full_sin = np.where(is_odd, cos, sin) * sin_sign
    return (
        torch.from_numpy(full_cos.astype(np.float32)),
        torch.from_numpy(full_sin.astype(np.float32)),
    )


def context_limit(config: object) -> int | None:
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
    module = model.model.rotary_emb
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
    full, full_factor = _frequencies(rope[FULL], width, double)
    sliding, sliding_factor = _frequencies(rope[SLIDING], width, double)
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
        frequencies = _longrope(rope, "short_factor", pairs)
        long = _at_rest(_longrope(rope, "long_factor", pairs), half)
        scaling = longrope_magnitude(rope, limit or rope[TRAINED_LENGTH])
    else:
        frequencies, scaling = _frequencies(rope, 2 * pairs, double)
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


def _longrope(rope: Mapping[str, object], name: str, pairs: int) -> Float[Tensor, " pairs"]:
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


def _frequencies(rope: Mapping[str, Any], width: int, double: bool) -> tuple[Tensor, float]:
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
