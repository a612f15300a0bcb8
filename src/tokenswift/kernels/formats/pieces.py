"""Pieces that blocks of several formats are made of."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).tiny


def halves(two: UInt8[Tensor, "N B two"]) -> Float16[Tensor, "N B"]:
    """The float16 number of each block, from its two bytes."""
    return two.contiguous().view(torch.float16)[..., 0]


def nibbles(packed: UInt8[Tensor, "N B *parts half"]) -> UInt8[Tensor, "N K"]:
    """The 4-bit numbers of each part of a block: low halves of all bytes, then high halves."""
    four = packed.clone(memory_format=torch.contiguous_format).view(torch.int32)  # bytes at a time
    return torch.cat((four & 0x0F0F0F0F, four >> 4 & 0x0F0F0F0F), -1).view(torch.uint8).flatten(1)


def fields(packed: UInt8[Tensor, "N B *parts bytes"], bits: int) -> UInt8[Tensor, "N K"]:
    """Numbers of a few bits of each part of a block: the lowest of all bytes, then the next of all, …"""
    mask = (1 << bits) - 1
    return torch.cat([packed >> place & mask for place in range(0, 8, bits)], -1).flatten(1)


def sixes(packed: UInt8[Tensor, "N B twelve"]) -> tuple[UInt8[Tensor, "N G"], UInt8[Tensor, "N G"]]:
    """The eight 6-bit scales of each block, and its eight 6-bit least values.

    The first four of either are the low bits of four bytes each. The others have their low 4 bits in the
    last four bytes (scales in the low half) and their high 2 bits on top of the first ones.
    """
    scale, least, low = packed.unflatten(-1, (3, 4)).unbind(-2)
    high_scale, high_least = scale >> 6 << 4, least >> 6 << 4
    scales = torch.cat((scale & 63, low & 15 | high_scale), -1)
    return scales.flatten(1), torch.cat((least & 63, low >> 4 | high_least), -1).flatten(1)


def pairs(numbers: Float[Tensor, "N B one"]) -> UInt8[Tensor, "N B two"]:
    """The two bytes of each number as float16."""
    return numbers.half().view(torch.uint8)


def nibbled(u: UInt8[Tensor, "N B n"]) -> UInt8[Tensor, "N B half"]:
    """What :func:`nibbles` reads: the first half of a block in the low halves of bytes."""
    low, high = u.chunk(2, -1)
    return low | high << 4


def inverse(scale: Float[Tensor, "N B one"]) -> Float[Tensor, "N B one"]:
    """1 / scale; 0 where that is no number: what float16 holds of such a scale is 0."""
    return torch.where(scale.abs() < SMALLEST, 0.0, 1 / scale)


def rounded(numbers: Tensor) -> Tensor:
    """Integers, halves away from zero."""
    size = numbers.abs()
    floor = size.floor()
    return numbers.sign() * (floor + (2 * (size - floor)).floor())
