"""Texts and passes that the tests of the CUDA backend share."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.rows import random_pages
from tokenswift.interfaces import Segment
from tokenswift.kernels.cpu.entries import SCALES as BEFORE_KEYS
from tokenswift.kernels.cpu.entries import IntFullCache as CpuCache
from tokenswift.kernels.cpu.entries import Pages
from tokenswift.kernels.cuda.entries import IntFullCache, entry_bytes, scales_of
from tokenswift.kernels.cuda.plan import Plan, plan_of
from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.kv.full import FullCache
from tokenswift.models.target import backend_for

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


# ---- keys and values in int8 ------------------------------------------------------------------------


def from_pages(cache: Pages) -> Tensor:
    """The entries of the CPU kernels' pages, as the card's kernels have them."""
    pages, width = cache.data, cache.width
    layers, kv_heads = pages.shape[:2]
    keys = (pages[..., BEFORE_KEYS : BEFORE_KEYS + 16 * width].int() - 128).to(torch.int8)
    keys = keys.unflatten(-1, (-1, 16, 4)).transpose(-3, -2).flatten(-2)  # (L, K, pages, 16, d)
    values = pages[..., BEFORE_KEYS + 16 * width :].view(torch.int8)
    values = values.unflatten(-1, (4, -1, 4)).transpose(-2, -1).flatten(-3, -2)[..., :width]
    made = torch.zeros(layers, kv_heads, cache.capacity, entry_bytes(width), dtype=torch.int8)
    made[..., :width], made[..., width : 2 * width] = keys.flatten(2, 3), values.flatten(2, 3)
    scales_of(made)[..., :3] = cache.scales.transpose(-2, -1).flatten(2, 3)
    return made


def int_segment(
    before: int, rows: int, parents: list[int] | None, kv_heads: int, width: int, seed: int = 2
) -> tuple[Segment, CpuCache]:
    """Rows over a cache of random entries, their own among them; and the same entries for the CPU kernels."""
    pages = backend_for().new_cache(1, kv_heads, width, before + rows, torch.int8)
    assert isinstance(pages, CpuCache)
    random_pages(pages, torch.Generator().manual_seed(seed))
    pages._length = before
    cache = IntFullCache(1, kv_heads, width, pages.capacity, CPU)
    cache.data.copy_(from_pages(pages.pages))
    cache.commit(tuple(range(before)))
    numbers = torch.arange(rows)
    return Segment(numbers, numbers, cache, parents), pages
