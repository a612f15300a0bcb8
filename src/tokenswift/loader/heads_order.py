"""The order of the rows of queries and keys within a head."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.kernels.formats import Stored


def in_halves(weight: Tensor | Stored, heads: int, rotated: int) -> Tensor | Stored:
    """Queries' or keys' weight, of whose heads positions rotate the first numbers alone, with its
    rows in the kernels' order: each half of a head begins with a half of those.

    Scores do not depend on the order, which is the same in queries and keys.

    Args:
        rotated: numbers of a head that positions rotate.
    """
    rows = halved(len(weight), heads, rotated)
    return weight.take(rows) if isinstance(weight, Stored) else weight[rows]


def halved(rows: int, heads: int, rotated: int) -> Tensor:
    """Where each row of :func:`in_halves` stands in a checkpoint."""
    width = rows // heads
    pairs = rotated // 2
    at_rest = width // 2 - pairs
    first = torch.arange(pairs)
    others = rotated + torch.arange(at_rest)
    order = torch.cat([first, others, first + pairs, others + at_rest])
    starts = torch.arange(heads) * width
    return (starts[:, None] + order).flatten()
