"""Q4_0: blocks of 32 numbers of 4 bits, less 8, and a float16 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers
from tokenswift.kernels.formats.pieces import halves, inverse, nibbled, nibbles, pairs


def _split(blocks: Tensor) -> Numbers:
    block = blocks.unflatten(1, (-1, 18))
    return Numbers(nibbles(block[..., 2:]), halves(block[..., :2]))


def _encode(rows: Tensor) -> Tensor:
    block = rows.unflatten(1, (-1, 32))
    largest = block.gather(-1, block.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    u = (block * inverse(scale) + 8.5).clamp(0, 15).to(torch.uint8)
    return torch.cat((pairs(scale), nibbled(u)), -1).flatten(1)


Q4_0 = Format("q4_0", code=2, block=32, nbytes=18, bits=4, split=_split, offset=8, encode=_encode)
