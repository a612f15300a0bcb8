"""Attention over keys and values in int8, in torch: what `int_kernels` computes, and what the CPU kernels do
(cpu_int_attention.h), number by number.

Sums of integers are exact in any order, here in float32 below 2^24; everything that is rounded comes in
the specification's order. So a row has its own bits here, too.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from tokenswift.interfaces import Segment
from tokenswift.kernels.cuda.entries import INVERSE, KEY, LEVEL, scales_of, width_of
from tokenswift.kernels.cuda.plan import CHUNK, Plan
from tokenswift.kernels.torch import row_paths

LOG2_E = 1.44269504
_MAGIC = 12582912.0  # 1.5 times 2^23: a number of no great size that is added to it becomes whole


def fused(x: Tensor, y: Tensor, z: Tensor | float) -> Tensor:
    """``x * y + z``, rounded once: the product is exact in double precision, the sum is rounded to odd there
    (Boldo and Melquiond 2008)."""
    product, more = x.double() * y.double(), torch.as_tensor(z, dtype=torch.float64, device=x.device)
    total = product + more
    part = total - product
    error = (product - (total - part)) + (more - part)  # what the sum has lost, exactly
    bits = total.view(torch.long)
    step = torch.where((error > 0) ^ (total < 0), 1, -1)
    odd = (error == 0) | error.isnan() | (bits & 1 == 1)
    return torch.where(odd, bits, bits + step).view(torch.float64).float()


def turns_of(x: Tensor) -> Tensor:
    """Numbers rounded to whole ones, halves to even."""
    return (x + _MAGIC) - _MAGIC


def power_of(power: Tensor) -> Tensor:
    """Two to whole powers of -126 to 127, float32."""
    return (power + 127 << 23).view(torch.float32)


def whole_rows(x: Float[Tensor, "*any d"]) -> tuple[Int8[Tensor, "*any d"], Float[Tensor, "*any"]]:
    """Rows as integers, whose greatest becomes 127, and their scales: NaN with what is no finite number,
    0 of nothing but the smallest."""
    most = x.float().abs().amax(-1)  # NaN is the greatest
    factor, finite = 127.0 / most, most.isfinite()
    usable = finite & (most > 0) & factor.isfinite()
    factor = torch.where(usable, factor, 0.0)[..., None]
    numbers = torch.where(factor > 0, turns_of(x.float() * factor), 0.0).to(torch.int8)
    scale = torch.where(usable, most / 127.0, 0.0)
    return numbers, torch.where(finite, scale, torch.nan)


def natural_log(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """``natural_log`` of cpu_tile.h, float64, of positive numbers."""
    m, power = torch.frexp(x.double())
    small = m < 0.70710678118654752
    m, power = torch.where(small, 2 * m, m), (power - small.to(power.dtype)).double()
    s = (m - 1) / (m + 1)
    z = s * s
    series = torch.full_like(z, 1.0 / 25)
    for n in range(23, 1, -2):
        series = series * z + 1.0 / n
    low = power * 1.90821492927058770002e-10 + (2 * s + 2 * s * (z * series))
    return power * 6.93147180369123816490e-01 + low


def put(data: Int8[Tensor, "K n e"], key: Float[Tensor, "n K d"], value: Float[Tensor, "n K d"]) -> None:
    """Write keys and values of one layer to entries."""
    width, scales = key.shape[2], scales_of(data)
    for part, given in enumerate((key, value)):
        numbers, scale = whole_rows(given.transpose(0, 1))
        data[..., part * width : (part + 1) * width] = numbers
        if not part:
            scales[..., KEY] = scale
            continue
        nothing = scale == 0  # any scale will do
        level = natural_log(torch.where(scale > 0, scale, 1.0)) * 1.4426950408889634
        level = torch.where(scale.isnan(), torch.nan, level)
        scales[..., LEVEL] = torch.where(nothing, -64.0, level).float()
        scales[..., INVERSE] = torch.where(nothing, 2.0**64, 1.0 / torch.where(nothing, 1.0, scale))
    scales[..., INVERSE + 1 :] = 0


def entries_of(floats: Float[Tensor, "L2 K c d"]) -> Int8[Tensor, "L K c e"]:
    """A float cache's tensor as one in int8."""
    layers2, kv_heads, capacity, width = floats.shape
    size = 2 * width + 16
    made = torch.empty(layers2 // 2, kv_heads, capacity, size, dtype=torch.int8, device=floats.device)
    for layer, data in enumerate(made):
        put(data, *(part.transpose(0, 1).float() for part in floats[2 * layer : 2 * layer + 2]))
    return made


def factor_of(scale: float) -> float:
    """What the scale of a query is multiplied with for scores to base 2, as a float32 product."""
    return float(torch.tensor(scale, dtype=torch.float32) * torch.tensor(LOG2_E, dtype=torch.float32))


def weights_of(x: Tensor) -> Tensor:
    """``127 * 2^x`` for x up to 0; below -100 as for -100. NaN stays NaN."""
    x = torch.where(x < -100.0, -100.0, x)
    turns = turns_of(x)
    r = x - turns
    p = fused(r, torch.full_like(r, 6.98612738), torch.full_like(r, 30.7607937))
    p = fused(p, r, torch.full_like(r, 88.0469360))
    p = fused(p, r, 127.0)
    return p * power_of(torch.where(x == x, turns, 0.0).int())


def exp(x: Tensor) -> Tensor:
    """``vexp`` of cpu_tile.h."""
    y = x.clamp(-104.0, 100.0)  # NaN stays NaN
    turns = turns_of(y * LOG2_E)
    r = fused(-turns, torch.full_like(y, 0.693145752), y)
    r = fused(-turns, torch.full_like(y, 1.42860677e-6), r)
    p = fused(r, torch.full_like(y, 1.38731625e-3), torch.full_like(y, 8.36889912e-3))
    for constant in (4.16657962e-2, 1.66664794e-1, 0.5, 1.0, 1.0):
        p = fused(p, r, torch.full_like(y, constant))
    power = torch.where(y == y, turns, 0.0).int()
    half = power >> 1
    return p * power_of(half) * power_of(power - half)


def append(plan: Plan, layer: int, key: Float[Tensor, "n K d"], value: Float[Tensor, "n K d"]) -> None:
    """Put keys and values of a pass behind the caches' own."""
    start = 0
    for segment in plan.segments:
        rows, at = slice(start, start + len(segment.tokens)), segment.cache.length
        into = slice(at, at + len(segment.tokens))
        put(segment.cache.data[layer, :, into], key[rows], value[rows])
        start = rows.stop


def attend(
    plan: Plan, query: Float[Tensor, "n H d"], layer: int, scale: float, window: int
) -> Float[Tensor, "n H d"]:
    """See :meth:`reference.Reference.attend`."""
    ends = accumulate((len(segment.tokens) for segment in plan.segments), initial=0)
    made = [
        _attended(segment, query[start:end], layer, scale, window)
        for segment, (start, end) in zip(plan.segments, pairwise(ends), strict=True)
    ]
    more = len(query) - sum(map(len, made))
    return torch.cat([*made, query.new_zeros(more, *query.shape[1:])])


def _attended(segment: Segment, query: Tensor, layer: int, scale: float, window: int) -> Tensor:
    """One text's rows (n, H, d): the chunks of each, merged in their order."""
    cache, (count, heads, width) = segment.cache, query.shape
    data = cache.data[layer]
    kv_heads = len(data)
    if width_of(cache.data) != width:
        raise ValueError(f"queries have a width of {width}; valid: {width_of(cache.data)}")
    numbers, scales = whole_rows(query.view(count, kv_heads, -1, width))
    asked, scales = numbers.float(), (scales * factor_of(scale))[..., None]
    paths = row_paths(count, segment.parents)
    here = cache.length + torch.tensor([len(path) - 1 for path in paths], device=query.device)
    nodes = torch.zeros(count, max(map(len, paths)), dtype=torch.long, device=query.device)
    for row, path in enumerate(paths):
        nodes[row, : len(path)] = torch.tensor(path)
    oldest = (here - window + 1).clamp_min(0) if window and cache.ordered else torch.zeros_like(here)

    total, top = torch.zeros_like(asked), torch.full_like(scales, -torch.inf)
    whole = torch.zeros_like(scales)
    for start in range(0, int(here.max()) + 1, CHUNK):
        places = torch.arange(start, start + CHUNK, device=query.device)
        seen = (places <= here[:, None]) & (places >= oldest[:, None])  # (n, keys)
        own = (places - cache.length).clamp(0, nodes.shape[1] - 1).expand(count, -1)
        slots = torch.where(places < cache.length, places, cache.length + nodes.gather(1, own))
        entries = data[:, torch.where(seen, slots, 0)].transpose(0, 1)  # (n, K, keys, e)
        levels = entries[..., 2 * width :].contiguous().view(torch.float32)
        exact = torch.einsum("nkgd,nkjd->nkgj", asked, entries[..., :width].float())
        key, level, inverse = (levels[:, :, None, :, part] for part in (KEY, LEVEL, INVERSE))
        seen = seen[:, None, None]
        scores = fused(exact, key * scales, level)
        found = _chunk(scores, inverse, seen, entries[..., width : 2 * width].float())
        total, top, whole = merged(total, top, whole, *found)
    return (total / whole).reshape(count, heads, width)


def _chunk(scores: Tensor, inverse: Tensor, seen: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted values, maximum and sum of a chunk, by scores (n, K, g, keys) and values (n, K, keys, d)."""
    best = torch.where(seen & (scores == scores), scores, -torch.inf).amax(-1, keepdim=True)
    none = best == -torch.inf
    nothing = torch.where(seen.any(-1, keepdim=True), torch.nan, 0.0)  # there are keys, but no numbers
    weights = weights_of(torch.where(seen, scores, -torch.inf) - torch.where(none, 0.0, best))
    weights = torch.where(seen & ~none, weights, 0.0)
    sums = torch.zeros_like(weights[..., :16])
    pairs = zip(weights.split(16, -1), inverse.split(16, -1), seen.split(16, -1), strict=True)
    for part, own, there in pairs:  # 16 sums by position
        sums = torch.where(there, fused(part, own, sums), sums)
    while sums.shape[-1] > 1:
        one, other = sums.chunk(2, -1)
        sums = one + other
    rounded = torch.where(weights == weights, turns_of(weights), 0.0)
    mixed = torch.einsum("nkgj,nkjd->nkgd", rounded, values)
    top = torch.where(none, torch.where(nothing == 0, best, nothing), best * 0.693147182)
    return mixed, top, torch.where(none, nothing, sums)


def merged(
    total: Tensor, top: Tensor, whole: Tensor, more: Tensor, peak: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Two sets of keys together, as ``merge`` of cpu_merge.h does it; a maximum of -inf is of none."""
    best = torch.where(peak > top, peak, top)
    safe = torch.where(best == -torch.inf, 0.0, best)
    old, new = exp(top - safe), exp(peak - safe)
    none, nothing = top == -torch.inf, peak == -torch.inf
    values = torch.where(none, more, fused(more, new, total * old))
    both = torch.where(none, sums, fused(sums, new, whole * old))
    best = torch.where(nothing, top, torch.where(none, peak, best))
    return torch.where(nothing, total, values), best, torch.where(nothing, whole, both)
