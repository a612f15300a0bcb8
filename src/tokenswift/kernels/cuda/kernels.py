"""The Triton kernels; `launch` starts each in one shape, whatever the number of rows.

`plan` makes the tables that they read.

A row's sums go in an order that its own context fixes: keys in pieces that end at fixed positions,
    within
them in tiles, then the pieces one block after the other. All passes run the same kernels of the
same shapes, so a row has the same bits alone, in a tree, beside other texts, eagerly and in a
graph.

With ``TRITON_INTERPRET=1`` in the environment before this is imported, Triton's interpreter runs
them on the CPU: in float32 alone, as its products of other types are wrong.
"""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from tokenswift.kernels.cuda import plan

CHUNK, NEAR, FAR = tl.constexpr(plan.CHUNK), tl.constexpr(plan.NEAR), tl.constexpr(plan.FAR)
TILE, FIELDS = tl.constexpr(plan.TILE), tl.constexpr(plan.FIELDS)
LOG2E = tl.constexpr(1.4426950408889634)
BLOCK = tl.constexpr(32)  # pieces that are merged together


@triton.jit
def add_norm(
    states,  # (n, D) float32, in place
    more,  # (n, D) float32
    behind,  # (D) float32
    weight,  # (D) float32
    out,  # (n, D)
    eps,
    factor,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, up to a power of two
    ADD: tl.constexpr,
    BEHIND: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Add ``more``, or its norm by the weight ``behind``, times a factor to a row, take the mean
    from it if asked, and take its RMS norm."""
    at, d = tl.program_id(0).to(tl.int64) * D, tl.arange(0, DP)
    x = tl.load(states + at + d, mask=d < D, other=0.0)
    if ADD:
        y = tl.load(more + at + d, mask=d < D, other=0.0)
        if BEHIND:
            y *= tl.rsqrt(tl.sum(y * y, 0) / D + eps) * tl.load(behind + d, mask=d < D, other=0.0)
        x += y * factor
    if CENTRED:
        x = tl.where(d < D, x - tl.sum(x, 0) / D, 0.0)
    if ADD or CENTRED:
        tl.store(states + at + d, x, mask=d < D)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / D + eps) * tl.load(weight + d, mask=d < D, other=0.0)
    tl.store(out + at + d, x.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def gated(
    both,  # (n, 2 I) float32: gate, then up
    out,  # (n, I)
    inner,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
):
    """``silu(gate) * up``; GeLU by its tanh is the gate times a logistic function, too."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(both + row * 2 * inner + i, mask=i < inner, other=0.0)
    up = tl.load(both + (row * 2 + 1) * inner + i, mask=i < inner, other=0.0)
    x = gate
    if GELU:
        x = 1.59576912 * (gate + 0.044715 * gate * gate * gate)
    y = gate / (1.0 + tl.exp(-x)) * up
    tl.store(out + row * inner + i, y.to(out.dtype.element_ty), mask=i < inner)


@triton.jit(do_not_specialize=["layer"])
def turn_append(
    mixed,  # (n, (H + 2 KV) D) float32: queries, keys and values
    cos,  # (n, D / 2) float32
    sin,
    query_norm,  # (D) float32
    key_norm,
    rows,
    data,  # where places of caches are counted from
    query,  # (n, H, D), out
    layer,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2, up to a power of two
    NORMS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Norm and turn a head of a row; a key or value goes to the row's slot in its cache."""
    half: tl.constexpr = D // 2
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HALF)
    inside = d < half
    at = (row * (H + 2 * KV) + head) * D + d
    x = tl.load(mixed + at, mask=inside, other=0.0)
    y = tl.load(mixed + at + half, mask=inside, other=0.0)
    if head < H + KV:
        if NORMS:
            by = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / D + eps)
            norm = tl.where(head < H, query_norm, key_norm) + d
            x = x * by * tl.load(norm, mask=inside, other=0.0)
            y = y * by * tl.load(norm + half, mask=inside, other=0.0)
        if TURNS:
            c = tl.load(cos + row * half + d, mask=inside, other=0.0)
            s = tl.load(sin + row * half + d, mask=inside, other=0.0)
            x, y = x * c - y * s, y * c + x * s
    if head < H:
        to = query + (row * H + head) * D + d
        tl.store(to, x.to(query.dtype.element_ty), mask=inside)
        tl.store(to + half, y.to(query.dtype.element_ty), mask=inside)
    else:
        base, capacity = tl.load(rows + row * FIELDS), tl.load(rows + row * FIELDS + 1)
        slot, number = tl.load(rows + row * FIELDS + 3), head - H
        plane = (2 * layer + number // KV) * KV + number % KV
        to = data + base + (plane * capacity + slot) * D + d
        kept = inside & (slot >= 0)
        tl.store(to, x.to(data.dtype.element_ty), mask=kept)
        tl.store(to + half, y.to(data.dtype.element_ty), mask=kept)


@triton.jit
def piece_of(position):
    """The piece that a position is in."""
    return tl.where(
        position < NEAR * CHUNK,
        position // CHUNK,
        NEAR + tl.maximum(position - NEAR * CHUNK, 0) // FAR,
    )


@triton.jit
def start_of(piece):
    """The first position of a piece."""
    return tl.where(piece < NEAR, piece * CHUNK, NEAR * CHUNK + (piece - NEAR) * FAR)


@triton.jit
def oldest_of(here, ordered, window):
    """The oldest position that a row sees; entries that do not stand at their positions know no
    window."""
    return tl.where((window > 0) & (ordered > 0), tl.maximum(here - window + 1, 0), 0)


@triton.jit(
    do_not_specialize=["n", "count", "pieces", "own", "deepest", "layer", "window", "scale", "cap"]
)
def attend(
    query,  # (n, H, D)
    data,  # where places of caches are counted from
    values,  # (pieces + own, n, H, D) float32, out
    stats,  # (pieces + own, n, H, 2) float32, out: maximum and sum
    rows,
    blocks,
    paths,
    n,
    count,  # of blocks
    pieces,
    own,
    deepest,
    layer,
    window,
    scale,  # times the logarithm of e to base 2
    cap,  # of scores, which are a tanh times it
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,  # queries of a program
    CAPPED: tl.constexpr,
):
    """Attention over one piece: of a block of rows over a piece that lies before all of them, or of
    one row over a piece in which the pass's own keys stand, gathered along the row's path."""
    group: tl.constexpr = H // KV
    program, head = tl.program_id(0), tl.program_id(1)
    shared = program < count * pieces
    unit = program - count * pieces
    block = program % count
    first = tl.where(shared, tl.load(blocks + 2 * block), unit // own)
    many = tl.where(shared, tl.load(blocks + 2 * block + 1), 1)
    # said here: of what a function returns the compiler loses it, and with it copies ahead
    base, capacity = (
        tl.multiple_of(tl.load(rows + first * FIELDS), 16),
        tl.load(rows + first * FIELDS + 1),
    )
    before, ordered = tl.load(rows + first * FIELDS + 2), tl.load(rows + first * FIELDS + 5)
    closed = piece_of(before)
    piece = tl.where(shared, (program // count).to(tl.int64), closed + unit % own)

    m = tl.program_id(2) * M + tl.arange(0, M)  # a second part where a group has more queries
    row, valid = first + m // group, m < many * group
    here = tl.load(rows + row * FIELDS + 4, mask=valid, other=-1)
    oldest = oldest_of(here, ordered, window)
    last = tl.max(here, 0)
    earliest = tl.min(tl.where(valid, oldest, last), 0)
    low, end = start_of(piece), start_of(piece + 1)
    high = tl.minimum(end, last + 1)
    if (low < high) & (end > earliest) & ((piece < closed) | (program >= count * pieces)):
        d, j = tl.arange(0, DP), tl.arange(0, TILE)
        inside = d < D
        at = (row * H + head * group + m % group) * D
        q = tl.load(
            query + at[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0
        )
        plane = capacity * KV * D
        keys = data + base + 2 * layer * plane + head * capacity * D
        acc = tl.zeros([M, DP], tl.float32)
        peak, sums = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
        for tile in range(low // TILE, (high + TILE - 1) // TILE):
            place = tile * TILE + j
            there = place < high
            node = tl.load(
                paths + first * deepest + place - before, mask=there & (place >= before), other=0
            )
            slot = tl.where(place < before, place, before + node)
            k = tl.load(
                keys + slot[None, :] * D + d[:, None],
                mask=there[None, :] & inside[:, None],
                other=0.0,
            )
            s = tl.dot(q, k, input_precision="ieee") * scale
            if CAPPED:  # to base 2, as they are
                s = cap * LOG2E - 2.0 * cap * LOG2E / (tl.exp2(s * (2.0 / cap)) + 1.0)
            seen = (place[None, :] <= here[:, None]) & (place[None, :] >= oldest[:, None])
            s = tl.where(seen, s, -float("inf"))
            best = tl.maximum(peak, tl.max(s, 1))
            safe = tl.where(best == -float("inf"), 0.0, best)
            p, old = tl.exp2(s - safe[:, None]), tl.exp2(peak - safe)
            v = tl.load(
                keys + plane + slot[:, None] * D + d[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
            sums = sums * old + tl.sum(p, 1)
            peak = best
        cell = tl.where(piece < closed, piece, pieces + piece - closed)
        to = (cell * n + row) * H + head * group + m % group
        tl.store(values + to[:, None] * D + d[None, :], acc, mask=valid[:, None] & inside[None, :])
        tl.store(stats + to * 2, peak, mask=valid)
        tl.store(stats + to * 2 + 1, sums, mask=valid)


@triton.jit(do_not_specialize=["n", "pieces", "window"])
def merge(
    values,
    stats,
    rows,
    out,  # (n, H, D)
    n,
    pieces,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """A row's pieces in their order, a block of them after the other."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    before, here = tl.load(rows + row * FIELDS + 2), tl.load(rows + row * FIELDS + 4)
    oldest = oldest_of(here, tl.load(rows + row * FIELDS + 5), window)
    closed, last = (
        piece_of(before),
        tl.where(here >= 0, piece_of(here), -1),
    )  # none: it fills up a pass
    b, d = tl.arange(0, BLOCK), tl.arange(0, DP)
    acc, whole = tl.zeros([DP], tl.float32), tl.zeros([1], tl.float32)
    top = tl.full([1], -float("inf"), tl.float32)
    for start in range(piece_of(oldest), last + 1, BLOCK):
        piece = start + b
        there = piece <= last
        at = (tl.where(piece < closed, piece, pieces + piece - closed) * n + row) * H + head
        peak = tl.load(stats + at * 2, mask=there, other=-float("inf"))
        sums = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
        x = tl.load(
            values + at[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
        )
        best = tl.maximum(top, tl.max(peak, 0))
        safe = tl.where(best == -float("inf"), 0.0, best)
        old, new = tl.exp2(top - safe), tl.exp2(peak - safe)
        acc = acc * old + tl.sum(x * new[:, None], 0)
        whole = whole * old + tl.sum(sums * new, 0)
        top = best
    acc = acc / tl.where(whole > 0, whole, 1.0)
    tl.store(out + (row * H + head) * D + d, acc.to(out.dtype.element_ty), mask=d < D)
