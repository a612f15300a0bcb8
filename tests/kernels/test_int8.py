"""Attention over keys and values in int8: against its specification in torch, and what caches
copy."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.rows import random_pages
from tests.tiny import tiny_model
from tokenswift.config.loading import LoadConfig
from tokenswift.kernels.attention import AttentionContext
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.int8_cache import Pages
from tokenswift.kernels.cpu.structs import SCALES
from tokenswift.kv.cache import FullCache
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import backend_for

pytestmark = pytest.mark.skipif(
    not isinstance(backend_for(), CpuBackend), reason="no compiled kernels here"
)

CHUNK = 256
CASES = [  # KV heads, group, width, committed keys, rows, window
    (1, 3, 64, 0, 1, 0),
    (3, 3, 64, 700, 1, 0),
    (3, 3, 64, 255, 5, 0),
    (2, 4, 40, 530, 20, 0),
    (2, 1, 128, 300, 13, 100),
    (1, 7, 80, 1000, 64, 0),
    (1, 2, 4, 511, 3, 7),
]


def kernels() -> CpuBackend:
    backend = backend_for()
    assert isinstance(backend, CpuBackend)
    return backend


class Numbers(NamedTuple):
    """Whole numbers (K, n, d) and scales (K, n) of keys and values."""

    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor


def numbers_of(cache: FullCache, count: int) -> Numbers:
    """Of the first tokens."""
    pages = cache.entries
    assert isinstance(pages, Pages)
    width = pages.width
    wide = pages.wide_keys[0]
    data = pages.pages(0)
    key_scales, _, inverses = pages.scales(0).unbind(-2)
    value_scales = 1 / inverses
    keys_end = SCALES + (32 if wide else 16) * width
    key_bytes = data[..., SCALES:keys_end]
    if wide:
        words = key_bytes.view(torch.int16).unflatten(-1, (-1, 16, 2))
    else:
        words = key_bytes.unflatten(-1, (-1, 16, 4))
    keys = words.transpose(-3, -2).flatten(-2).double() - (0 if wide else 128)
    filled = -(-width // 16) * 16
    values = data[..., keys_end:].view(torch.int8).unflatten(-1, (4, filled, 4))
    values = values.transpose(-2, -1).flatten(-3, -2)[..., :width].double()
    return Numbers(
        keys=keys.flatten(1, 2)[:, :count],
        key_scales=key_scales.flatten(1, 2)[:, :count],
        values=values.flatten(1, 2)[:, :count],
        value_scales=value_scales.flatten(1, 2)[:, :count],
    )


def weights_of(x: Tensor) -> Tensor:
    """16383 · 2^x by the specification's polynomial, for x from -100 to 0."""
    turns = x.clamp_min(-100).round()
    r = x.clamp_min(-100) - turns
    polynomial = 16383 + r * (11358.0547 + r * (3968.14233 + r * 901.210449))
    return polynomial * 2**turns


def expected(cache: FullCache, query: Tensor, before: int, window: int, scale: float) -> Tensor:
    """Rows of a chain by the specification, chunk by chunk."""
    heads, rows, _ = query.shape
    total = before + rows
    keys, key_scales, values, value_scales = numbers_of(cache, total)
    assert isinstance(cache.entries, Pages)
    levels = 511 if cache.entries.wide_keys[0] else 127
    q_scale = query.abs().amax(-1, keepdim=True) / levels
    q = (query / q_scale).round().double()
    of_keys = torch.arange(total)[None]
    of_rows = torch.arange(before, total)[:, None]
    seen = (of_keys <= of_rows) & (of_keys > of_rows - (window or total))
    out = torch.zeros(rows, heads, query.shape[-1])
    for head in range(heads):
        kv = head // (heads // len(keys))
        scales = key_scales[kv] * (q_scale[head] * scale)
        scores = (q[head] @ keys[kv].T) * scales * math.log2(math.e)
        scores = (scores + value_scales[kv].double().log2()).masked_fill(~seen, -math.inf)
        most = scores.amax(1, keepdim=True)
        numerator = torch.zeros(rows, values.shape[-1]).double()
        denominator = torch.zeros(rows, 1).double()
        for start in range(0, total, CHUNK):
            chunk = slice(start, start + CHUNK)
            part = scores[:, chunk]
            top = part.amax(1, keepdim=True)
            weights = weights_of(part - torch.where(top.isinf(), 0.0, top)) * (part > -math.inf)
            products = weights.round() @ values[kv, chunk]
            factor = torch.exp2(top - most)
            numerator += factor * products
            denominator += factor * (weights / value_scales[kv, chunk]).sum(1, keepdim=True)
        out[:, head] = (numerator / denominator).float()
    return out


@pytest.mark.parametrize("wide", [False, True], ids=["int8", "int16"])
@pytest.mark.parametrize("kv_heads, group, width, before, rows, window", CASES)
def test_attention_is_the_specification(
    kv_heads: int, group: int, width: int, before: int, rows: int, window: int, wide: bool
) -> None:
    noise = torch.Generator().manual_seed(before)
    capacity = before + rows + 20
    cache = kernels().new_cache(1, kv_heads, width, capacity, torch.int8, [wide])
    random_pages(cache, noise)
    cache._length = before
    query = torch.randn(kv_heads * group, rows, width, generator=noise)
    context = AttentionContext(layer=0, cache=cache, parents=None, scale=width**-0.5, window=window)
    attended = kernels().attend(query, context)
    specified = expected(cache, query, before, window, width**-0.5)
    distance = (attended - specified).abs()
    # a number that lies halfway may be rounded the other way: 1/127 of the largest
    assert distance.max() < specified.abs().max() / 100
    assert distance.median() < 1e-6


@pytest.mark.parametrize("key_type, levels", [("int8", 127), ("int16", 8191)])
def test_a_pass_writes_what_a_float_pass_writes_rounded(key_type: str, levels: int) -> None:
    model = tiny_model("llama")
    target = NativeTarget(model, kernels(), rotary_of(model))
    tokens = torch.arange(2, 42)
    floats = target.new_cache(64)
    target.forward(tokens, torch.arange(40), floats)
    target.compute_as(LoadConfig(kv_cache_dtype=key_type), "tiny")
    integers = target.new_cache(64)
    assert isinstance(integers.entries, Pages)
    target.forward(tokens, torch.arange(40), integers)
    floats.commit(tuple(range(40)))
    integers.commit(tuple(range(40)))
    keys = floats.keys(0)
    half_a_step = keys.abs().amax(-1, keepdim=True) / levels / 2
    assert ((integers.keys(0) - keys).abs() <= half_a_step * 1.01).all()
    numbers = numbers_of(integers, 40)
    rounded = numbers.values * numbers.value_scales[..., None]
    values = floats.data[1, :, :40]
    half_a_step = values.abs().amax(-1, keepdim=True) / 127 / 2
    assert ((rounded - values).abs() <= half_a_step * 1.001).all()


@pytest.mark.parametrize("what", ["key", "value", "query"])
def test_what_is_no_number_is_seen(what: str) -> None:
    noise = torch.Generator().manual_seed(3)
    cache = kernels().new_cache(1, 1, 16, 64, torch.int8)
    assert isinstance(cache.entries, Pages)
    random_pages(cache, noise)
    cache._length = 30
    query = torch.randn(2, 2, 16, generator=noise)
    if what == "query":
        query[0, 1, 5] = math.inf
    else:
        cache.entries.scales(0)[..., 0 if what == "key" else 1, 7] = math.nan
    context = AttentionContext(layer=0, cache=cache, parents=None, scale=0.25)
    assert kernels().attend(query, context)[1, 0].isnan().all()
