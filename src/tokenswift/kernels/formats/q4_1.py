"""Q4_1: blocks of 32 numbers of 4 bits, a scale and a least value, float16."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers
from tokenswift.kernels.formats.pieces import halves, inverse, nibbled, nibbles, pairs


def _split(blocks: Tensor) -> Numbers:
    block = blocks.unflatten(1, (-1, 20))
    return Numbers(nibbles(block[..., 4:]), halves(block[..., :2]), halves(block[..., 2:4]))


def _encode(rows: Tensor) -> Tensor:
    block = rows.unflatten(1, (-1, 32))
    least, most = block.aminmax(dim=-1, keepdim=True)
    scale = (most - least) / 15
    u = ((block - least) * inverse(scale) + 0.5).clamp(0, 15).to(torch.uint8)
    return torch.cat((pairs(scale), pairs(least), nibbled(u)), -1).flatten(1)


Q4_1 = Format("q4_1", code=3, block=32, nbytes=20, bits=4, split=_split, encode=_encode)
