"""Q4_K: blocks of 256 numbers of 4 bits; each 32 have a scale and a least value of 6 bits, and the block a
float16 factor of either."""

from __future__ import annotations

from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers
from tokenswift.kernels.formats.pieces import halves, nibbles, sixes


def _split(blocks: Tensor) -> Numbers:
    block = blocks.unflatten(1, (-1, 144))
    fine, fine_least = sixes(block[..., 4:16])
    return Numbers(
        u=nibbles(block[..., 16:].unflatten(-1, (4, 32))),
        scale=halves(block[..., :2]),
        least=-halves(block[..., 2:4]),
        fine=fine,
        fine_least=fine_least,
    )


Q4_K = Format("q4_k", code=12, block=256, nbytes=144, bits=4, split=_split)
