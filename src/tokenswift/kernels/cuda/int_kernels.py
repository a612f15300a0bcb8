"""The Triton kernels of keys and values in int8. `int_reference` says in torch what they compute.

They follow the CPU kernels (cpu_int_attention.h and cpu_merge.h) rounding by rounding: products of whole
numbers are exact, every fused step is written out, and sums and chunks come in the same order. Entries of a
cache are as `entries` says; ``levels`` are the same bytes as float32 numbers.
"""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from tokenswift.kernels.cuda.attention_kernels import chunks_of, keep_part, no_keys, part_at, task_of
from tokenswift.kernels.cuda.row_kernels import turned

# ---- integers ----------------------------------------------------------------------------------


@triton.jit
def greatest_bits(x):
    """The greatest of numbers without their signs, as bits: NaN is the greatest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def scale_of(bits):
    """The scale of numbers with such a greatest one, which becomes 127, and what they are multiplied with."""
    most = bits.to(tl.float32, bitcast=True)
    finite = most <= 3.402823466e38
    factor = tl.where(finite & (most > 0), tl.div_rn(127.0, tl.where(most > 0, most, 1.0)), 0.0)
    usable = finite & (factor <= 3.402823466e38)
    scale = tl.where(usable, tl.div_rn(most, 127.0), 0.0)
    return tl.where(finite, scale, float("nan")), tl.where(usable, factor, 0.0)


@triton.jit
def whole_of(x):
    """Numbers of at most 127 as whole ones, halves to even; NaN as 0."""
    whole = (x + 12582912.0) - 12582912.0
    return tl.where(x == x, whole, 0.0).to(tl.int8)


@triton.jit
def level_of(scale):
    """The logarithm of a scale to base 2: ``natural_log`` of cpu_tile.h in double precision."""
    bits = scale.to(tl.float64).to(tl.int64, bitcast=True)
    power = (bits >> 52) - 1022
    m = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    small = m < 0.70710678118654752
    m = tl.where(small, m * 2.0, m)
    power = tl.where(small, power - 1, power).to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * 0.0 + 1.0 / 25
    for i in tl.static_range(11):
        series = series * z + 1.0 / (23 - 2 * i)
    low = power * 1.90821492927058770002e-10 + (s * 2.0 + s * 2.0 * (z * series))
    level = ((power * 6.93147180369123816490e-01 + low) * 1.4426950408889634).to(tl.float32)
    return tl.where(scale > 0, level, tl.where(scale == 0, -64.0, scale))


@triton.jit
def whole_queries(
    query,  # (n, H, D) float32
    numbers,  # (n, H, D) int8, out
    scales,  # (n, H) float32, out
    factor,  # of the scales
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Queries as integers with one scale each."""
    at, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    x = tl.load(query + at * D + d, mask=d < D, other=0.0)
    scale, up = scale_of(greatest_bits(x))
    tl.store(numbers + at * D + d, whole_of(tl.where(up > 0, x * up, 0.0)), mask=d < D)
    tl.store(scales + at, scale * factor)


@triton.jit(do_not_specialize=["layer"])
def turn_append_whole(
    mixed,  # (PARTS, n, (H + 2 KV) D) float32: queries, keys and values
    cos,  # (n, D / 2)
    sin,
    query_norm,
    key_norm,
    places,
    data,
    levels,
    query,  # (n, H, D) float32, out
    layer,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2, up to a power of two
    NORMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`row_kernels.turn_append` with keys and values in int8."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    size: tl.constexpr = 2 * D + 16
    d = tl.arange(0, HALF)
    inside = d < half
    x, y = turned(mixed, cos, sin, query_norm, key_norm, row, head, d, eps, H, KV, D, NORMS, PARTS)
    if head < H:
        to = query + (row * H + head) * D + d
        tl.store(to, x, mask=inside)
        tl.store(to + half, y, mask=inside)
    else:
        offset, capacity = tl.load(places + row * 6), tl.load(places + row * 6 + 1)
        slot = tl.load(places + row * 6 + 2)
        value = (head - H) // KV
        entry = offset + ((layer.to(tl.int64) * KV + (head - H) % KV) * capacity + slot) * size
        scale, up = scale_of(tl.maximum(greatest_bits(x), greatest_bits(y)))
        inside = inside & (slot >= 0)
        into = data + entry + value * D + d
        tl.store(into, whole_of(tl.where(up > 0, x * up, 0.0)), mask=inside)
        tl.store(into + half, whole_of(tl.where(up > 0, y * up, 0.0)), mask=inside)
        at = levels + entry // 4 + D // 2
        if value == 0:
            tl.store(at, scale, mask=slot >= 0)
        else:
            nothing = scale == 0  # any scale will do
            inverse = tl.where(nothing, 18446744073709551616.0, tl.div_rn(1.0, tl.where(nothing, 1.0, scale)))
            tl.store(at + 1, level_of(scale), mask=slot >= 0)
            tl.store(at + 2, inverse, mask=slot >= 0)


# ---- attention --------------------------------------------------------------------------------------


@triton.jit
def weights_of(x):
    """``127 * 2^x`` for x up to 0; below -100 as for -100. NaN stays NaN."""
    y = tl.where(x < -100.0, -100.0, x)
    turned_y = y + 12582912.0
    r = y - (turned_y - 12582912.0)
    p = tl.fma(r, 6.98612738, 30.7607937)
    p = tl.fma(p, r, 88.0469360)
    p = tl.fma(p, r, 127.0)
    power = (turned_y.to(tl.int32, bitcast=True) - 0x4B400000) << 23
    return tl.where(x == x, (p.to(tl.int32, bitcast=True) + power).to(tl.float32, bitcast=True), x)


@triton.jit
def exp(x):
    """``vexp`` of cpu_tile.h."""
    y = tl.where(x > 100.0, 100.0, tl.where(x < -104.0, -104.0, x))
    turned_y = y * 1.44269504 + 12582912.0
    turns = turned_y - 12582912.0
    r = tl.fma(-turns, 0.693145752, y)
    r = tl.fma(-turns, 1.42860677e-6, r)
    p = tl.fma(r, 1.38731625e-3, 8.36889912e-3)
    p = tl.fma(p, r, 4.16657962e-2)
    p = tl.fma(p, r, 1.66664794e-1)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    power = turned_y.to(tl.int32, bitcast=True) - 0x4B400000
    half = power >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x == x, p * first * ((power - half + 127) << 23).to(tl.float32, bitcast=True), x)


@triton.jit
def merged_whole(total, top, whole, more, peak, sums):
    """`attention_kernels.merged` as ``merge`` of cpu_merge.h does it; NaN is no maximum of -inf."""
    best = tl.where(peak > top, peak, top)
    safe = tl.where(best == -float("inf"), 0.0, best)
    old, new = exp(top - safe), exp(peak - safe)
    none, nothing = top == -float("inf"), peak == -float("inf")
    both = tl.fma(more, tl.broadcast_to(new[:, None], more.shape), total * old[:, None])
    values = tl.where(nothing[:, None], total, tl.where(none[:, None], more, both))
    wholes = tl.where(none, sums, tl.fma(sums, new, whole * old))
    best = tl.where(nothing, top, tl.where(none, peak, best))
    return values, best, tl.where(nothing, whole, wholes)


@triton.jit
def halves(x, M: tl.constexpr, N: tl.constexpr):
    """The first N / 2 and the last columns of (M, N)."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def sums_16(sums, x, y, first, oldest, last, M: tl.constexpr):
    """Add 16 columns of x times y to 16 partial sums, where a row sees the positions from the first on."""
    place = (first + tl.arange(0, 16))[None, :]
    seen = (place >= oldest[:, None]) & (place <= last[:, None])
    return tl.where(seen, tl.fma(x, tl.broadcast_to(y, (M, 16)), sums), sums)


@triton.jit
def sums_32(sums, x, y, first, oldest, last, M: tl.constexpr):
    """`sums_16` of 32 columns, in their order."""
    x, x_more = halves(x, M, 32)
    y, y_more = halves(y, 1, 32)
    sums = sums_16(sums, x, y, first, oldest, last, M)
    return sums_16(sums, x_more, y_more, first + 16, oldest, last, M)


@triton.jit
def sums_64(sums, x, y, first, oldest, last, M: tl.constexpr):
    """`sums_16` of 64 columns, in their order."""
    x, x_more = halves(x, M, 64)
    y, y_more = halves(y, 1, 64)
    sums = sums_32(sums, x, y, first, oldest, last, M)
    return sums_32(sums, x_more, y_more, first + 32, oldest, last, M)


@triton.jit
def added(sums, M: tl.constexpr):
    """Partial sums (M, 16) added as a tree."""
    one, other = halves(sums, M, 16)
    one, other = halves(one + other, M, 8)
    one, other = halves(one + other, M, 4)
    one, other = halves(one + other, M, 2)
    return tl.reshape(one + other, (M,))


@triton.jit
def scored(
    q,
    scale,
    keys,
    level,
    paths,
    start,
    before,
    end,
    path,
    deepest,
    oldest,
    here,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scores (M, TILE) to base 2 with the keys of the positions from ``start`` on, logarithms of the values'
    scales included; whether each is seen; which positions there are; and their slots."""
    size: tl.constexpr = 2 * D + 16
    d = tl.arange(0, DP)
    place = start + tl.arange(0, TILE)
    there = place < end
    gathered = (path >= 0) & (place >= before)
    node = tl.load(paths + path * deepest + place - before, mask=gathered & there, other=0)
    slot = tl.where(gathered, before + node, place)
    k = tl.load(keys + slot[None, :] * size + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0)
    at = level + slot * (size // 4)
    both = tl.load(at, mask=there, other=0.0)[None, :] * scale[:, None]
    more = tl.load(at + 1, mask=there, other=0.0)[None, :]
    s = tl.fma(tl.dot(q, k).to(tl.float32), both, tl.broadcast_to(more, (M, TILE)))
    seen = (place[None, :] <= here[:, None]) & (place[None, :] >= oldest[:, None])
    return s, seen, there, slot


@triton.jit(do_not_specialize=["blocks_count", "cells", "span", "own", "rows", "deepest", "layer", "window"])
def attend_whole_chunks(
    query,  # (n, H, D) int8
    scales,  # (n, H) float32, of the queries, for scores to base 2
    data,  # of the first text's cache, from which others count
    levels,
    values,  # (cells + own, n, H, D) float32, out
    stats,  # (cells + own, n, H, 2) float32, out: maximum and sum
    blocks,
    units,
    places,
    paths,
    blocks_count,
    cells,
    span,  # chunks of a cell
    own,
    rows,
    deepest,
    layer,
    window,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, up to a power of two of 32 or more
    M: tl.constexpr,  # queries of a program
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention over the shared chunks of one cell, or over one own chunk, of a block of rows and a KV head.

    Scores are computed twice, as a chunk's greatest is needed before its weights: for it, and for these.
    """
    group: tl.constexpr = H // KV
    size: tl.constexpr = 2 * D + 16
    head = tl.program_id(1)
    offset, capacity, before, path, cell, low, high, end, m, row, valid, here, oldest = task_of(
        blocks, units, places, blocks_count, cells, own, span, window, group, M, CHUNK
    )
    here = tl.minimum(here, end - 1)

    d = tl.arange(0, DP)
    inside = d < D
    at = row * H + head * group + m % group
    q = tl.load(query + at[:, None] * D + d[None, :], mask=valid[:, None] & inside[None, :], other=0)
    scale = tl.load(scales + at, mask=valid, other=0.0)
    entries = offset + (layer.to(tl.int64) * KV + head) * capacity * size
    keys, level = data + entries, levels + entries // 4 + D // 2
    total, top, whole = no_keys(M, DP)
    for chunk in range(low, high):
        start = chunk * CHUNK
        tiles = tl.minimum(CHUNK // TILE, (end - start + TILE - 1) // TILE)
        best = tl.full([M], -float("inf"), tl.float32)
        for tile in range(0, tiles):
            s, seen, _, _ = scored(
                q, scale, keys, level, paths, start + tile * TILE, before, end, path, deepest, oldest, here,
                M, D, DP, TILE,
            )  # fmt: skip
            best = tl.maximum(best, tl.max(tl.where(seen & (s == s), s, -float("inf")), 1))
        none = best == -float("inf")
        sums = tl.zeros([M, 16], tl.float32)
        acc = tl.zeros([M, DP], tl.int32)
        for tile in range(0, tiles):
            first = start + tile * TILE
            s, seen, there, slot = scored(
                q, scale, keys, level, paths, first, before, end, path, deepest, oldest, here,
                M, D, DP, TILE,
            )  # fmt: skip
            p = weights_of(tl.where(seen, s, -float("inf")) - tl.where(none, 0.0, best)[:, None])
            p = tl.where(seen & (best > -float("inf"))[:, None], p, 0.0)
            inverse = tl.load(level + slot * (size // 4) + 2, mask=there, other=0.0)[None, :]
            sums = sums_64(sums, p, inverse, first, oldest, here, M)
            v = tl.load(
                keys + D + slot[:, None] * size + d[None, :], mask=there[:, None] & inside[None, :], other=0
            )
            acc = tl.dot(whole_of(p), v, acc, out_dtype=tl.int32)
        some = (here >= start) & (oldest < start + CHUNK)
        nothing = tl.where(some, float("nan"), 0.0)  # there are keys, but no numbers
        peak = tl.where(none, tl.where(some, float("nan"), best), best * 0.693147182)
        whole_sums = tl.where(none, nothing, added(sums, M))
        total, top, whole = merged_whole(total, top, whole, acc.to(tl.float32), peak, whole_sums)
    if low < high:
        to = (cell * rows + row) * H + head * group + m % group
        keep_part(values, stats, to, valid, total, top, whole, D, DP)


@triton.jit(do_not_specialize=["cells", "span", "rows", "window"])
def merge_whole_chunks(
    values,
    stats,
    places,
    out,  # (n, H, D) float32
    cells,
    span,
    rows,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A row's chunks in their order: the shared cells, then its own."""
    row, head = tl.program_id(0), tl.program_id(1)
    closed, final, oldest = chunks_of(places, row, window, CHUNK)
    total, top, whole = no_keys(1, DP)
    for cell in range(oldest // span, tl.where(oldest < closed, (closed + span - 1) // span, 0)):
        more, peak, sums = part_at(values, stats, (cell * rows + row) * H + head, True, D, DP)
        total, top, whole = merged_whole(total, top, whole, more, peak, sums)
    for chunk in range(tl.maximum(oldest, closed), final + 1):
        at = ((cells + chunk - closed) * rows + row) * H + head
        more, peak, sums = part_at(values, stats, at, True, D, DP)
        total, top, whole = merged_whole(total, top, whole, more, peak, sums)
    d = tl.arange(0, DP)[None, :]
    to = out + (row * H + head) * D + d
    tl.store(to, tl.div_rn(total, tl.broadcast_to(whole[:, None], (1, DP))), mask=d < D)
