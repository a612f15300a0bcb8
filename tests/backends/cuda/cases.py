"""Texts and passes that the tests of the CUDA backend share."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.backends.cuda.plan import Plan, plan_of
from tokenswift.cache.full import FullCache
from tokenswift.interfaces import Segment
from tokenswift.weights.format import Stored
from tokenswift.weights.registry import FORMATS

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tree(rows: int, reach: int) -> list[int]:
    """Parents; a small reach makes it deep, a large one wide."""
    made = torch.Generator().manual_seed(rows)
    return [-1, *(int(torch.randint(max(0, i - reach), i, (1,), generator=made)) for i in range(1, rows))]


def segment(
    before: int,
    rows: int,
    parents: list[int] | None,
    kv_heads: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 2,
    layers: int = 1,
    ordered: bool = True,
) -> Segment:
    """Rows over a cache of random keys and values, their own among them."""
    cache = FullCache(layers, kv_heads, width, before + rows, dtype, CPU)
    cache.data.copy_(random(*cache.data.shape, seed=seed))
    cache.commit(tuple(range(before)))
    cache.ordered = ordered
    numbers = torch.arange(rows)
    return Segment(numbers, numbers, cache, parents)


def plan(segments: list[Segment], heads: int) -> Plan:
    return plan_of(segments, heads, CPU)


def low(form: str, rows: int, columns: int) -> Stored:
    """A random weight of few bits."""
    encode = FORMATS[form].encode
    assert encode is not None
    return Stored(FORMATS[form], encode(random(rows, columns, seed=1)))
