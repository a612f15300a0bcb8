"""Rotary positions as a value: frequencies of a model, and cosines and sines of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from tokenswift.types import InputError

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
