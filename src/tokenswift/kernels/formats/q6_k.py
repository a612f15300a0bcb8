"""Q6_K: blocks of 256 numbers of 6 bits, less 32; each 16 have a scale of 8 bits with a sign, and the block a
float16 factor of it."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers
from tokenswift.kernels.formats.pieces import fields, halves, nibbles


def _split(blocks: Tensor) -> Numbers:
    block = blocks.unflatten(1, (-1, 210))
    low = nibbles(block[..., :128].unflatten(-1, (2, 64)))
    high = fields(block[..., 128:192].unflatten(-1, (2, 32)), 2)
    fine = block[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Numbers(low | high << 4, halves(block[..., 208:]), fine=fine)


Q6_K = Format("q6_k", code=14, block=256, nbytes=210, bits=6, split=_split, group=16, offset=32)
