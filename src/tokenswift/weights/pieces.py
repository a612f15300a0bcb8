"""Pieces that blocks of several formats are made of."""

from __future__ import annotations

import torch
from jaxtyping import Float16, UInt8
from torch import Tensor


def halves(pairs: UInt8[Tensor, "N B two"]) -> Float16[Tensor, "N B"]:
    """The float16 number of each block, from its two bytes."""
    return pairs.contiguous().view(torch.float16)[..., 0]


def nibbles(packed: UInt8[Tensor, "N B half"]) -> UInt8[Tensor, "N K"]:
    """The 4-bit numbers of each block: low halves of all bytes, then high halves."""
    return torch.cat((packed & 15, packed >> 4), -1).flatten(1)
