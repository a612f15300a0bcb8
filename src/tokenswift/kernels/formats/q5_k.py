"""Q5_K: as Q4_K, with a fifth bit of each number in bytes of its own."""

from __future__ import annotations

from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers
from tokenswift.kernels.formats.pieces import fields, halves, nibbles, sixes


def _split(blocks: Tensor) -> Numbers:
    block = blocks.unflatten(1, (-1, 176))
    fine, fine_least = sixes(block[..., 4:16])
    return Numbers(
        u=nibbles(block[..., 48:].unflatten(-1, (4, 32))) | fields(block[..., 16:48], 1) << 4,
        scale=halves(block[..., :2]),
        least=-halves(block[..., 2:4]),
        fine=fine,
        fine_least=fine_least,
    )


Q5_K = Format("q5_k", code=13, block=256, nbytes=176, bits=5, split=_split)
