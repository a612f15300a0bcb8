"""Q8_0: blocks of 32 numbers of 8 bits with a sign, and a float16 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers
from tokenswift.kernels.formats.pieces import halves, inverse, pairs, rounded


def _split(blocks: Tensor) -> Numbers:
    block = blocks.unflatten(1, (-1, 34))
    u = block[..., 2:] ^ 128  # two's complement plus 128
    return Numbers(u.flatten(1), halves(block[..., :2]))


def _encode(rows: Tensor) -> Tensor:
    block = rows.unflatten(1, (-1, 32))
    scale = block.abs().amax(-1, keepdim=True) / 127
    q = rounded(block * inverse(scale)).to(torch.int8)
    return torch.cat((pairs(scale), q.view(torch.uint8)), -1).flatten(1)


Q8_0 = Format("q8_0", code=8, block=32, nbytes=34, bits=8, split=_split, offset=128, encode=_encode)
