"""The Triton kernels; `launch` starts each in one shape, whatever the number of rows, and `plan`
makes the tables that they read.

A row's sums go in an order that its own context fixes: keys in chunks that end at fixed positions,
within them in tiles, then the chunks one block after the other. All passes run the same kernels of
the same shapes, so a row has the same bits alone, in a tree, beside other sequences, eagerly and in
a graph.

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

CHUNK = tl.constexpr(plan.CHUNK)
NEAR = tl.constexpr(plan.NEAR)
FAR = tl.constexpr(plan.FAR)
TILE = tl.constexpr(plan.TILE)
LOG2E = tl.constexpr(1.4426950408889634)
MERGED = tl.constexpr(32)  # chunks that are merged together
#: fields of a `plan.RowEntry`
FIELDS = tl.constexpr(plan.FIELDS)
BASE = tl.constexpr(plan.RowEntry._fields.index("base"))
CAPACITY = tl.constexpr(plan.RowEntry._fields.index("capacity"))
BEFORE = tl.constexpr(plan.RowEntry._fields.index("before"))
SLOT = tl.constexpr(plan.RowEntry._fields.index("slot"))
POSITION = tl.constexpr(plan.RowEntry._fields.index("position"))
ORDERED = tl.constexpr(plan.RowEntry._fields.index("ordered"))


@triton.jit
def add_norm(
    states,  # (n, D) float32, in place
    addend,  # (n, D) float32
    addend_norm,  # (D) float32
    weight,  # (D) float32
    out,  # (n, D)
    eps,
    factor,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, up to a power of two
    ADD: tl.constexpr,
    NORM_ADDEND: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Add ``addend``, or its norm by the weight ``addend_norm``, times a factor to a row; subtract
    the row's mean if it is to be centred; and take its RMS norm."""
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, DP)
    x = tl.load(states + row + d, mask=d < D, other=0.0)
    if ADD:
        y = tl.load(addend + row + d, mask=d < D, other=0.0)
        if NORM_ADDEND:
            w = tl.load(addend_norm + d, mask=d < D, other=0.0)
            y *= tl.rsqrt(tl.sum(y * y, 0) / D + eps) * w
        x += y * factor
    if CENTRED:
        x = tl.where(d < D, x - tl.sum(x, 0) / D, 0.0)
    if ADD or CENTRED:
        tl.store(states + row + d, x, mask=d < D)
    if NORM:
        w = tl.load(weight + d, mask=d < D, other=0.0)
        x *= tl.rsqrt(tl.sum(x * x, 0) / D + eps) * w
    tl.store(out + row + d, x.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def gated(
    gate_up,  # (n, 2 I) float32: gate, then up
    out,  # (n, I)
    inner,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
):
    """``silu(gate) * up``; GeLU by its tanh is the gate times a logistic function, too."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(gate_up + row * 2 * inner + i, mask=i < inner, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * inner + i, mask=i < inner, other=0.0)
    x = gate
    if GELU:
        x = 1.59576912 * (gate + 0.044715 * gate * gate * gate)
    y = gate / (1.0 + tl.exp(-x)) * up
    tl.store(out + row * inner + i, y.to(out.dtype.element_ty), mask=i < inner)


@triton.jit
def entry_of(rows, row, layer, number, KV: tl.constexpr, D: tl.constexpr):
    """Where a row's key or value of a layer goes, from the origin, and its slot. Numbers below KV
    are heads of keys, the others of values."""
    entry = rows + row * FIELDS
    base = tl.load(entry + BASE)
    capacity = tl.load(entry + CAPACITY)
    slot = tl.load(entry + SLOT)
    plane = (2 * layer + number // KV) * KV + number % KV
    return base + (plane * capacity + slot) * D, slot


@triton.jit
def load_halves(place, half: tl.constexpr, inside):
    """The two halves of a head's numbers."""
    x = tl.load(place, mask=inside, other=0.0)
    y = tl.load(place + half, mask=inside, other=0.0)
    return x, y


@triton.jit
def store_halves(place, x, y, half: tl.constexpr, mask):
    """The two halves of a head's numbers, in the type of what they go to."""
    tl.store(place, x.to(place.dtype.element_ty), mask=mask)
    tl.store(place + half, y.to(place.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def rotate_append(
    qkv,  # (n, (H + 2 KV) D) float32: queries, keys and values
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
    ROTATES: tl.constexpr,
):
    """Norm and rotate a head of a row; a key or value goes to the row's slot in its cache."""
    half: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    inside = d < half
    place = (row * (H + 2 * KV) + head) * D + d
    x, y = load_halves(qkv + place, half, inside)
    if head < H + KV:
        if NORMS:
            inverse = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / D + eps)
            norm = tl.where(head < H, query_norm, key_norm) + d
            first, second = load_halves(norm, half, inside)
            x = x * inverse * first
            y = y * inverse * second
        if ROTATES:
            c = tl.load(cos + row * half + d, mask=inside, other=0.0)
            s = tl.load(sin + row * half + d, mask=inside, other=0.0)
            x, y = x * c - y * s, y * c + x * s
    if head < H:
        store_halves(query + (row * H + head) * D + d, x, y, half, inside)
    else:
        offset, slot = entry_of(rows, row, layer, head - H, KV, D)
        store_halves(data + offset + d, x, y, half, inside & (slot >= 0))


@triton.jit
def chunk_of(position):
    """The chunk that a position is in."""
    far = NEAR + tl.maximum(position - NEAR * CHUNK, 0) // FAR
    return tl.where(position < NEAR * CHUNK, position // CHUNK, far)


@triton.jit
def start_of(chunk):
    """The first position of a chunk."""
    return tl.where(chunk < NEAR, chunk * CHUNK, NEAR * CHUNK + (chunk - NEAR) * FAR)


@triton.jit
def oldest_of(position, ordered, window):
    """The oldest position that a row sees; entries that do not stand at their positions know no
    window."""
    windowed = (window > 0) & (ordered > 0)
    return tl.where(windowed, tl.maximum(position - window + 1, 0), 0)


@triton.jit(
    do_not_specialize=[
        "n",
        "count",
        "prefix_chunks",
        "tree_chunks",
        "deepest",
        "layer",
        "window",
        "scale",
        "cap",
    ]
)
def attend(
    query,  # (n, H, D)
    data,  # where places of caches are counted from
    values,  # (prefix_chunks + tree_chunks, n, H, D) float32, out
    stats,  # (prefix_chunks + tree_chunks, n, H, 2) float32, out: maximum and sum
    rows,
    blocks,
    paths,
    n,
    count,  # of blocks
    prefix_chunks,
    tree_chunks,
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
    """Attention over one chunk: of a block of rows over a chunk that lies before all of them, or of
    one row over a chunk in which the pass's own keys stand, gathered along the row's path."""
    group: tl.constexpr = H // KV
    program = tl.program_id(0)
    head = tl.program_id(1)
    in_prefix = program < count * prefix_chunks
    unit = program - count * prefix_chunks
    block = program % count
    first = tl.where(in_prefix, tl.load(blocks + 2 * block), unit // tree_chunks)
    many = tl.where(in_prefix, tl.load(blocks + 2 * block + 1), 1)
    entry = rows + first * FIELDS
    # said in the kernel itself: of what a function returns the compiler loses it, and with it
    # copies ahead
    base = tl.multiple_of(tl.load(entry + BASE), 16)
    capacity = tl.load(entry + CAPACITY)
    before = tl.load(entry + BEFORE)
    ordered = tl.load(entry + ORDERED)
    closed = chunk_of(before)
    chunk = tl.where(in_prefix, (program // count).to(tl.int64), closed + unit % tree_chunks)

    m = tl.program_id(2) * M + tl.arange(0, M)  # a second part where a group has more queries
    row = first + m // group
    valid = m < many * group
    position = tl.load(rows + row * FIELDS + POSITION, mask=valid, other=-1)
    oldest = oldest_of(position, ordered, window)
    last = tl.max(position, 0)
    earliest = tl.min(tl.where(valid, oldest, last), 0)
    low = start_of(chunk)
    end = start_of(chunk + 1)
    high = tl.minimum(end, last + 1)
    if (low < high) & (end > earliest) & ((chunk < closed) | (program >= count * prefix_chunks)):
        d = tl.arange(0, DP)
        j = tl.arange(0, TILE)
        inside = d < D
        of_row = (row * H + head * group + m % group) * D
        q = tl.load(
            query + of_row[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0
        )
        plane = capacity * KV * D
        keys = data + base + 2 * layer * plane + head * capacity * D
        acc = tl.zeros([M, DP], tl.float32)
        peak = tl.full([M], -float("inf"), tl.float32)
        sums = tl.zeros([M], tl.float32)
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
            seen = (place[None, :] <= position[:, None]) & (place[None, :] >= oldest[:, None])
            s = tl.where(seen, s, -float("inf"))
            best = tl.maximum(peak, tl.max(s, 1))
            safe = tl.where(best == -float("inf"), 0.0, best)
            p = tl.exp2(s - safe[:, None])
            old = tl.exp2(peak - safe)
            v = tl.load(
                keys + plane + slot[:, None] * D + d[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
            sums = sums * old + tl.sum(p, 1)
            peak = best
        cell = tl.where(chunk < closed, chunk, prefix_chunks + chunk - closed)
        to = (cell * n + row) * H + head * group + m % group
        tl.store(values + to[:, None] * D + d[None, :], acc, mask=valid[:, None] & inside[None, :])
        tl.store(stats + to * 2, peak, mask=valid)
        tl.store(stats + to * 2 + 1, sums, mask=valid)


@triton.jit
def chunks_of(rows, row, window):
    """Of a row: the first chunk of the tree, the first and the last chunk that it sees."""
    entry = rows + row * FIELDS
    position = tl.load(entry + POSITION)
    oldest = oldest_of(position, tl.load(entry + ORDERED), window)
    last = tl.where(position >= 0, chunk_of(position), -1)  # none: it fills up a pass
    return chunk_of(tl.load(entry + BEFORE)), chunk_of(oldest), last


@triton.jit(do_not_specialize=["n", "prefix_chunks", "window"])
def merge(
    values,
    stats,
    rows,
    out,  # (n, H, D)
    n,
    prefix_chunks,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """A row's chunks in their order, a block of them after the other."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    closed, first, last = chunks_of(rows, row, window)
    b = tl.arange(0, MERGED)
    d = tl.arange(0, DP)
    acc = tl.zeros([DP], tl.float32)
    total = tl.zeros([1], tl.float32)
    top = tl.full([1], -float("inf"), tl.float32)
    for start in range(first, last + 1, MERGED):
        chunk = start + b
        there = chunk <= last
        cell = tl.where(chunk < closed, chunk, prefix_chunks + chunk - closed)
        of_chunk = (cell * n + row) * H + head
        peak = tl.load(stats + of_chunk * 2, mask=there, other=-float("inf"))
        sums = tl.load(stats + of_chunk * 2 + 1, mask=there, other=0.0)
        inside = there[:, None] & (d < D)[None, :]
        x = tl.load(values + of_chunk[:, None] * D + d[None, :], mask=inside, other=0.0)
        best = tl.maximum(top, tl.max(peak, 0))
        safe = tl.where(best == -float("inf"), 0.0, best)
        old = tl.exp2(top - safe)
        new = tl.exp2(peak - safe)
        acc = acc * old + tl.sum(x * new[:, None], 0)
        total = total * old + tl.sum(sums * new, 0)
        top = best
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * H + head) * D + d, acc.to(out.dtype.element_ty), mask=d < D)
