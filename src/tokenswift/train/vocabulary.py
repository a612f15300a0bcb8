"""Which tokens matter: by how often they stand in the training text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.train.store import HiddenStore


def counts(stores: Sequence[HiddenStore], vocab_size: int) -> Int[Tensor, " V"]:
    """How often each token stands in the stores."""
    total = torch.zeros(vocab_size, dtype=torch.long)
    for store in stores:
        tokens, _ = store.arrays()
        for start in range(0, len(tokens), 1 << 22):
            piece = torch.from_numpy(tokens[start : start + (1 << 22)].astype("int64"))
            total += torch.bincount(piece, minlength=vocab_size)
    return total


def _ranked(found: Int[Tensor, " V"]) -> Int[Tensor, " V"]:
    """Tokens, the most frequent first; ties: the smaller id."""
    return found.argsort(descending=True, stable=True)


def frequent(found: Int[Tensor, " V"], size: int) -> Int[Tensor, " S"]:
    """The ``size`` most frequent tokens, ascending; 0 takes the whole vocabulary."""
    if size <= 0 or size >= len(found):
        return torch.arange(len(found))
    return _ranked(found)[:size].sort().values


def covering(found: Int[Tensor, " V"], share: float) -> Int[Tensor, " S"]:
    """The fewest tokens that make up ``share`` of the text, ascending; at least one."""
    order = _ranked(found)
    mass = found[order].double().cumsum(0) / max(1, int(found.sum()))
    size = int((mass < share - 1e-12).sum()) + 1
    return order[: min(size, len(order))].sort().values
