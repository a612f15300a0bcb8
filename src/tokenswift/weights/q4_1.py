"""Q4_1: blocks of 32 numbers of 4 bits, a scale and a least value, float16."""

from __future__ import annotations

from torch import Tensor

from tokenswift.weights.format import Format, Numbers
from tokenswift.weights.pieces import halves, nibbles


def _split(blocks: Tensor) -> Numbers:
    block = blocks.unflatten(1, (-1, 20))
    return Numbers(nibbles(block[..., 4:]), halves(block[..., :2]), halves(block[..., 2:4]))


Q4_1 = Format("q4_1", code=3, block=32, nbytes=20, bits=4, split=_split)
