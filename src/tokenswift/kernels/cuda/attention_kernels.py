"""The Triton kernels of attention, and what those over int8 (`int_kernels`) share with them. `reference` says
in torch what they compute, `launch` starts them.

Every sum is over one row, in an order that its own length fixes: no kernel takes another shape for another
number of rows, and none is compiled with contraction of products and sums.
"""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merged(total, top, whole, more, peak, sums):
    """Weighted values (m, d), maxima and sums (m) of two sets of keys together; a maximum of -inf: none."""
    best = tl.maximum(top, peak)
    safe = tl.where(best == -float("inf"), 0.0, best)
    old, new = tl.exp(top - safe), tl.exp(peak - safe)
    none, nothing = top == -float("inf"), peak == -float("inf")
    both = total * old[:, None] + more * new[:, None]
    values = tl.where(none[:, None], more, tl.where(nothing[:, None], total, both))
    return values, best, tl.where(none, sums, tl.where(nothing, whole, whole * old + sums * new))


@triton.jit
def no_keys(M: tl.constexpr, DP: tl.constexpr):
    """What `merged` takes of M queries that have seen nothing."""
    return tl.zeros([M, DP], tl.float32), tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def part_at(values, stats, at, there, D: tl.constexpr, DP: tl.constexpr):
    """What `merged` takes of one query and the keys whose sums stand at a place; of none unless ``there``."""
    d = tl.arange(0, DP)[None, :]
    mixed = tl.load(values + at * D + d, mask=(d < D) & there, other=0.0)
    peak, sums = two_stats(stats, at, there)
    return mixed, peak, sums


@triton.jit
def four_values(values, at, size, span, end, D: tl.constexpr, DP: tl.constexpr):
    """Weighted values of one query and four spans, ``size`` places apart; 0 from the span ``end`` on."""
    d = tl.arange(0, DP)[None, :]
    x0 = tl.load(values + at * D + d, mask=(d < D) & (span < end), other=0.0)
    x1 = tl.load(values + (at + size) * D + d, mask=(d < D) & (span + 1 < end), other=0.0)
    x2 = tl.load(values + (at + 2 * size) * D + d, mask=(d < D) & (span + 2 < end), other=0.0)
    x3 = tl.load(values + (at + 3 * size) * D + d, mask=(d < D) & (span + 3 < end), other=0.0)
    return x0, x1, x2, x3


@triton.jit
def two_stats(stats, at, there):
    """Maximum and sum of one query and a set of keys; of none unless ``there``."""
    one = tl.arange(0, 1)
    peak = tl.load(stats + at * 2 + one, mask=there, other=-float("inf"))
    return peak, tl.load(stats + at * 2 + 1 + one, mask=there, other=0.0)


@triton.jit
def four_stats(stats, at, size, span, end):
    """`two_stats` of the four spans of `four_values`."""
    p0, s0 = two_stats(stats, at, span < end)
    p1, s1 = two_stats(stats, at + size, span + 1 < end)
    p2, s2 = two_stats(stats, at + 2 * size, span + 2 < end)
    p3, s3 = two_stats(stats, at + 3 * size, span + 3 < end)
    return p0, s0, p1, s1, p2, s2, p3, s3


@triton.jit
def keep_part(values, stats, to, valid, total, top, whole, D: tl.constexpr, DP: tl.constexpr):
    """Put the sums of M queries where `part_at` finds them, at the places ``to`` (M) that are valid."""
    d = tl.arange(0, DP)[None, :]
    tl.store(values + to[:, None] * D + d, total, mask=valid[:, None] & (d < D))
    tl.store(stats + to * 2, top, mask=valid)
    tl.store(stats + to * 2 + 1, whole, mask=valid)


@triton.jit
def capped(scores, softcap):
    """``softcap * tanh(scores / softcap)``."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))


@triton.jit
def task_of(
    blocks,
    units,
    places,
    blocks_count,
    cells,
    own,
    span,  # chunks of a cell
    window,
    GROUP: tl.constexpr,  # query heads to a KV head
    M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What a program attends: where its text's entries are, their capacity, how many are committed, and the
    path; the cell, its chunks from ``low`` to ``high``, and the position that ends them; of its M queries the
    place in the block, the row, whether there is one, its position, and the oldest position that it sees."""
    program = tl.program_id(0)
    shared = program < blocks_count * cells
    unit = program - blocks_count * cells
    entry = tl.where(shared, program % blocks_count, unit // own) * 8
    cell = tl.where(shared, program // blocks_count, cells + unit % own)
    table = tl.where(shared, blocks, units)
    # said here: on what a function returns the compiler loses the hint, and with it copies ahead
    offset, capacity = tl.multiple_of(tl.load(table + entry), 16), tl.load(table + entry + 1)
    before, first = tl.load(table + entry + 2), tl.load(table + entry + 3)
    count, path = tl.load(table + entry + 4), tl.load(table + entry + 5)
    ordered = tl.load(table + entry + 6)
    closed = before // CHUNK
    last = tl.load(places + (first + count - 1) * 6 + 5)
    low = tl.where(shared, cell * span, closed + unit % own)
    high = tl.where(shared, tl.minimum(low + span, closed), tl.minimum(low + 1, last // CHUNK + 1))
    end = tl.where(shared, high * CHUNK, last + 1)  # keys from there on are not looked at

    m = tl.program_id(2) * M + tl.arange(0, M)  # a second part where a group has more queries
    row, valid = first + m // GROUP, m < count * GROUP
    here = tl.load(places + row * 6 + 5, mask=valid, other=0)
    oldest = tl.where((window > 0) & (ordered > 0), tl.maximum(here - window + 1, 0), 0)
    earliest = tl.min(tl.where(valid, oldest, 1 << 60), 0)
    low = tl.maximum(low, earliest // CHUNK)
    return offset, capacity, before, path, cell, low, high, end, m, row, valid, here, oldest


@triton.jit
def chunks_of(places, row, window, CHUNK: tl.constexpr):
    """The chunks that a row sees: how many are closed, the last, and the first."""
    before, ordered = tl.load(places + row * 6 + 3), tl.load(places + row * 6 + 4)
    here = tl.load(places + row * 6 + 5)
    oldest = tl.where((window > 0) & (ordered > 0), tl.maximum(here - window + 1, 0), 0)
    return before // CHUNK, here // CHUNK, oldest // CHUNK


@triton.jit
def asked(
    query,
    data,
    row,
    m,
    valid,
    head,  # of keys and values
    offset,
    capacity,
    layer,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """The queries (M, d) of a program, where a layer's keys of its head are, and how far behind them the
    values."""
    group: tl.constexpr = H // KV
    d = tl.arange(0, DP)
    at = (row * H + head * group + m % group) * D
    q = tl.load(query + at[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    plane = capacity * KV * D
    return q, data + offset + 2 * layer.to(tl.int64) * plane + head * capacity * D, plane


@triton.jit
def span_of(
    q,
    keys,
    plane,
    paths,
    low,
    high,
    before,
    end,
    path,
    deepest,
    oldest,
    here,
    scale,
    softcap,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
):
    """What `merged` takes of M queries and the chunks from ``low`` to ``high``, which are of one span."""
    tiles: tl.constexpr = CHUNK // TILE
    d, j = tl.arange(0, DP), tl.arange(0, TILE)
    inside = d < D
    total, top, whole = no_keys(M, DP)
    acc, peak, sums = no_keys(M, DP)
    for tile in range(low * tiles, high * tiles):
        place = tile * TILE + j
        there = place < end
        turned = (path >= 0) & (place >= before)
        node = tl.load(paths + path * deepest + place - before, mask=turned & there, other=0)
        slot = tl.where(turned, before + node, place)
        k = tl.load(keys + slot[None, :] * D + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * scale
        if CAP:
            s = capped(s, softcap)
        seen = (there[None, :] & (place[None, :] <= here[:, None])) & (place[None, :] >= oldest[:, None])
        s = tl.where(seen, s, -float("inf"))
        best = tl.maximum(peak, tl.max(s, 1))
        safe = tl.where(best == -float("inf"), 0.0, best)
        p = tl.exp(s - safe[:, None])
        old = tl.exp(peak - safe)
        v = tl.load(
            keys + plane + slot[:, None] * D + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        sums = sums * old + tl.sum(p, 1)
        peak = best
        if tile % tiles == tiles - 1:  # the chunk is complete
            total, top, whole = merged(total, top, whole, acc, peak, sums)
            acc, peak, sums = no_keys(M, DP)
    return total, top, whole


@triton.jit(
    do_not_specialize=[
        "blocks_count",
        "spans",
        "own",
        "rows",
        "deepest",
        "layer",
        "window",
        "scale",
        "softcap",
    ]
)
def attend_chunks(
    query,  # (n, H, D)
    data,  # of the first text's cache, from which others count
    values,  # (spans + own, n, H, D) float32, out
    stats,  # (spans + own, n, H, 2) float32, out: maximum and sum
    blocks,
    units,
    places,
    paths,
    blocks_count,
    spans,
    own,
    rows,
    deepest,
    layer,
    window,
    scale,
    softcap,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, up to a power of two
    M: tl.constexpr,  # queries of a program
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attention over the chunks of one span, or over one own chunk, of a block of rows and a KV head."""
    group: tl.constexpr = H // KV
    head = tl.program_id(1)
    offset, capacity, before, path, cell, low, high, end, m, row, valid, here, oldest = task_of(
        blocks, units, places, blocks_count, spans, own, SPAN, window, group, M, CHUNK
    )
    q, keys, plane = asked(query, data, row, m, valid, head, offset, capacity, layer, H, KV, D, DP)
    total, top, whole = span_of(
        q, keys, plane, paths, low, high, before, end, path, deepest, oldest, here, scale, softcap,
        M, D, DP, CHUNK, TILE, CAP,
    )  # fmt: skip
    if low < high:
        to = (cell * rows + row) * H + head * group + m % group
        keep_part(values, stats, to, valid, total, top, whole, D, DP)


@triton.jit(do_not_specialize=["layer", "window", "scale", "softcap"])
def attend_rows(
    query,  # (n, H, D)
    data,  # of the first text's cache, from which others count
    values,  # (programs, M, DP) float32, a program's own room
    out,  # (n, H, D)
    blocks,
    places,
    sinks,  # (H) float32
    layer,
    window,
    scale,
    softcap,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attention of a block of rows of a long chain and a KV head over all keys, by one program: the sums of
    `attend_chunks` in the order of `attend_merge`. What the spans so far have given waits in memory, as
    registers hold the sums of a chunk and of a span."""
    group: tl.constexpr = H // KV
    head = tl.program_id(1)
    # one cell that all closed chunks are in; the block's own come behind them
    offset, capacity, before, path, _, low, _, _, m, row, valid, here, oldest = task_of(
        blocks, blocks, places, tl.num_programs(0), 1, 1, 1 << 30, window, group, M, CHUNK
    )
    last = tl.max(tl.where(valid, here, 0), 0)
    high = last // CHUNK + 1
    q, keys, plane = asked(query, data, row, m, valid, head, offset, capacity, layer, H, KV, D, DP)
    d = tl.arange(0, DP)[None, :]
    program = (tl.program_id(2) * tl.num_programs(1) + head).to(tl.int64) * tl.num_programs(
        0
    ) + tl.program_id(0)
    room = values + program * (M * DP) + tl.arange(0, M)[:, None] * DP + d
    total, top, whole = no_keys(M, DP)
    tl.store(room, total)
    for span in range(low // SPAN, (high + SPAN - 1) // SPAN):
        first, after = tl.maximum(low, span * SPAN), tl.minimum(high, (span + 1) * SPAN)
        more, peak, sums = span_of(
            q, keys, plane, places, first, after, before, last + 1, path, 0, oldest, here, scale, softcap,
            M, D, DP, CHUNK, TILE, CAP,
        )  # fmt: skip
        tl.debug_barrier()  # threads may read what others have written
        total, top, whole = merged(tl.load(room), top, whole, more, peak, sums)
        tl.store(room, total)
    tl.debug_barrier()
    total = tl.load(room)
    if SINKS:
        sink = tl.load(sinks + head * group + m % group)
        total, top, whole = merged(total, top, whole, total * 0.0, sink, sink * 0.0 + 1.0)
    to = out + (row * H + head * group + m % group)[:, None] * D + d
    mask = valid[:, None] & (d < D)
    tl.store(to, (total / whole[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["spans", "rows", "window"])
def attend_merge(
    values,
    stats,
    places,
    sinks,  # (H) float32
    out,  # (n, H, D)
    spans,
    rows,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    SINKS: tl.constexpr,
):
    """A row's chunks in their order: those of a span first, then the spans."""
    row, head = tl.program_id(0), tl.program_id(1)
    closed, final, oldest = chunks_of(places, row, window, CHUNK)
    total, top, whole = no_keys(1, DP)
    shared = closed // SPAN  # spans before it are complete; the sums of eight are on their way together
    size = rows * H
    for span in range(oldest // SPAN, shared, 8):
        at = (span * rows + row) * H + head
        x0, x1, x2, x3 = four_values(values, at, size, span, shared, D, DP)
        x4, x5, x6, x7 = four_values(values, at + 4 * size, size, span + 4, shared, D, DP)
        p0, s0, p1, s1, p2, s2, p3, s3 = four_stats(stats, at, size, span, shared)
        p4, s4, p5, s5, p6, s6, p7, s7 = four_stats(stats, at + 4 * size, size, span + 4, shared)
        total, top, whole = merged(total, top, whole, x0, p0, s0)
        total, top, whole = merged(total, top, whole, x1, p1, s1)
        total, top, whole = merged(total, top, whole, x2, p2, s2)
        total, top, whole = merged(total, top, whole, x3, p3, s3)
        total, top, whole = merged(total, top, whole, x4, p4, s4)
        total, top, whole = merged(total, top, whole, x5, p5, s5)
        total, top, whole = merged(total, top, whole, x6, p6, s6)
        total, top, whole = merged(total, top, whole, x7, p7, s7)
    for span in range(tl.maximum(oldest // SPAN, shared), final // SPAN + 1):
        low = tl.maximum(span * SPAN, oldest)
        there = low < tl.minimum((span + 1) * SPAN, closed)
        x, peak, sums = part_at(values, stats, (span * rows + row) * H + head, there, D, DP)
        for chunk in range(tl.maximum(low, closed), tl.minimum((span + 1) * SPAN, final + 1)):
            at = ((spans + chunk - closed) * rows + row) * H + head
            more, last, others = part_at(values, stats, at, True, D, DP)
            x, peak, sums = merged(x, peak, sums, more, last, others)
        total, top, whole = merged(total, top, whole, x, peak, sums)
    if SINKS:
        sink = tl.load(sinks + head + tl.arange(0, 1))
        total, top, whole = merged(total, top, whole, total * 0.0, sink, sink * 0.0 + 1.0)
    d = tl.arange(0, DP)[None, :]
    to = out + (row * H + head) * D + d
    tl.store(to, (total / whole[:, None]).to(out.dtype.element_ty), mask=d < D)
