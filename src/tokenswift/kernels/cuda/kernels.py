"""The Triton kernels. `reference` says in torch what they compute, `launch` starts them.

Every sum is over one row, in an order that its own length fixes: no kernel takes another shape for another
number of rows, and none is compiled with contraction of products and sums.
"""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

# ---- attention --------------------------------------------------------------------------------------


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
    entry = tl.where(shared, program % blocks_count, unit // own) * 7
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
    tiles: tl.constexpr = CHUNK // TILE
    head = tl.program_id(1)
    offset, capacity, before, path, cell, low, high, end, m, row, valid, here, oldest = task_of(
        blocks, units, places, blocks_count, spans, own, SPAN, window, group, M, CHUNK
    )

    d = tl.arange(0, DP)
    inside = d < D
    at = (row * H + head * group + m % group) * D
    q = tl.load(query + at[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    plane = capacity * KV * D
    keys = data + offset + 2 * layer.to(tl.int64) * plane + head * capacity * D
    j = tl.arange(0, TILE)

    total = tl.zeros([M, DP], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    nothing = tl.full([M], -float("inf"), tl.float32)
    top, peak = nothing, nothing
    whole = tl.zeros([M], tl.float32)
    sums = tl.zeros([M], tl.float32)
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
            acc, sums, peak = tl.zeros([M, DP], tl.float32), tl.zeros([M], tl.float32), nothing
    if low < high:
        to = (cell * rows + row) * H + head * group + m % group
        tl.store(values + to[:, None] * D + d[None, :], total, mask=valid[:, None] & inside[None, :])
        tl.store(stats + to * 2, top, mask=valid)
        tl.store(stats + to * 2 + 1, whole, mask=valid)


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
    d = tl.arange(0, DP)
    one = tl.arange(0, 1)
    inside = (d < D)[None, :]
    total = tl.zeros([1, DP], tl.float32)
    top = tl.full([1], -float("inf"), tl.float32)
    whole = tl.zeros([1], tl.float32)
    for span in range(oldest // SPAN, final // SPAN + 1):
        low = tl.maximum(span * SPAN, oldest)
        there = low < tl.minimum((span + 1) * SPAN, closed)
        at = (span * rows + row) * H + head
        x = tl.load(values + at * D + d[None, :], mask=inside & there, other=0.0)
        peak = tl.load(stats + at * 2 + one, mask=there, other=-float("inf"))
        sums = tl.load(stats + at * 2 + 1 + one, mask=there, other=0.0)
        for chunk in range(tl.maximum(low, closed), tl.minimum((span + 1) * SPAN, final + 1)):
            at = ((spans + chunk - closed) * rows + row) * H + head
            more = tl.load(values + at * D + d[None, :], mask=inside, other=0.0)
            last = tl.load(stats + at * 2 + one)
            x, peak, sums = merged(x, peak, sums, more, last, tl.load(stats + at * 2 + 1 + one))
        total, top, whole = merged(total, top, whole, x, peak, sums)
    if SINKS:
        sink = tl.load(sinks + head + one)
        total, top, whole = merged(total, top, whole, total * 0.0, sink, sink * 0.0 + 1.0)
    to = (row * H + head) * D + d[None, :]
    tl.store(out + to, (total / whole[:, None]).to(out.dtype.element_ty), mask=inside)


# ---- rows of states ---------------------------------------------------------------------------------


@triton.jit
def add_norm(
    states,  # (n, D) float32
    more,  # (n, D) float32, added to them in place
    weight,
    out,
    eps,
    D: tl.constexpr,
    DP: tl.constexpr,
    ADD: tl.constexpr,
):
    """RMS norm of a row, of the type of ``out``; what a block gave is added first."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    inside = d < D
    x = tl.load(states + row * D + d, mask=inside, other=0.0)
    if ADD:
        x += tl.load(more + row * D + d, mask=inside, other=0.0)
        tl.store(states + row * D + d, x, mask=inside)
    factor = 1.0 / tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), D * 1.0) + eps)
    w = tl.load(weight + d, mask=inside, other=0.0)
    tl.store(out + row * D + d, (x * factor * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def turned(
    mixed,
    cos,
    sin,
    query_norm,
    key_norm,
    row,
    head,
    d,  # of a half
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Both halves of a head of a row, queries and keys normed and turned; see `turn_append`."""
    half: tl.constexpr = D // 2
    inside = d < half
    at = mixed + (row * (H + 2 * KV) + head) * D + d
    x, y = tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)
    if head < H + KV:
        if NORMS:
            factor = 1.0 / tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0) + tl.sum(y * y, 0), D * 1.0) + eps)
            norm = tl.where(head < H, query_norm, key_norm) + d
            x = x * factor * tl.load(norm, mask=inside, other=0.0)
            y = y * factor * tl.load(norm + half, mask=inside, other=0.0)
        c = tl.load(cos + row * half + d, mask=inside, other=0.0)
        s = tl.load(sin + row * half + d, mask=inside, other=0.0)
        x, y = x * c - y * s, y * c + x * s
    return x, y


@triton.jit(do_not_specialize=["layer"])
def turn_append(
    mixed,  # (n, (H + 2 KV) D) float32: queries, keys and values
    cos,  # (n, D / 2)
    sin,
    query_norm,
    key_norm,
    places,
    data,
    query,  # (n, H, D) out
    layer,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2, up to a power of two
    NORMS: tl.constexpr,
):
    """Norm and turn the queries and keys of a row; put keys and values behind those of its cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    inside = d < half
    x, y = turned(mixed, cos, sin, query_norm, key_norm, row, head, d, eps, H, KV, D, NORMS)
    offset, capacity = tl.load(places + row * 6), tl.load(places + row * 6 + 1)
    slot = tl.load(places + row * 6 + 2)
    if head < H:
        to = query + (row * H + head) * D + d
    else:
        number = head - H
        part = 2 * layer.to(tl.int64) + number // KV
        to = data + tl.multiple_of(offset, 16) + ((part * KV + number % KV) * capacity + slot) * D + d
        inside = inside & (slot >= 0)
    tl.store(to, x.to(query.dtype.element_ty), mask=inside)
    tl.store(to + half, y.to(query.dtype.element_ty), mask=inside)


@triton.jit
def gated(
    both,  # (n, 2 I) float32: gate, then up
    out,  # (n, I)
    inner,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """``silu(gate) * up``, or with ``GELU`` its tanh form of the gate."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    x = tl.load(both + row * 2 * inner + i, mask=inside, other=0.0)
    up = tl.load(both + row * 2 * inner + inner + i, mask=inside, other=0.0)
    # gelu(x) = x / (1 + exp(-2 u)) with tanh's argument u, so both are x times a sigmoid
    u = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x
    y = tl.div_rn(x, 1.0 + tl.exp(-u))
    tl.store(out + row * inner + i, (y * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["capacity", "start", "count"])
def move_rows(
    data,  # (planes, capacity, D)
    nodes,  # (count) rising rows behind ``start``
    capacity,
    start,
    count,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Move entries ``start + nodes[i]`` of a plane to ``start + i``, all read before any is written."""
    plane = data + tl.program_id(0).to(tl.int64) * capacity * D
    i, d = tl.arange(0, ROWS), tl.arange(0, DP)
    inside = (i < count)[:, None] & (d < D)[None, :]
    at = start + tl.load(nodes + i, mask=i < count, other=0)
    x = tl.load(plane + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    tl.debug_barrier()
    tl.store(plane + (start + i)[:, None] * D + d[None, :], x, mask=inside)


# ---- products ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def product(
    states,  # (n, K)
    weight,  # (N, K)
    bias,  # (N) float32
    out,  # (n, N) float32
    rows,
    N,
    K,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Rows times the weight's transpose: one chain over the inner dimension, in blocks of one size."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    a = states + m.to(tl.int64)[:, None] * K
    b = weight + n.to(tl.int64)[None, :] * K
    acc = tl.zeros([M, COLUMNS], tl.float32)
    for start in range(0, K, INNER):
        at = start + k
        x = tl.load(a + at[None, :], mask=(m < rows)[:, None] & (at < K)[None, :], other=0.0)
        w = tl.load(b + at[:, None], mask=(n < N)[None, :] & (at < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    to = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, acc, mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def to_whole(
    states,  # (n, K) float32
    numbers,  # (n, 32 G) int8, out
    scales,  # (n, G) float32, out
    sums,  # (n, G) float32, out: of the numbers
    K,
    G,
    GROUPS: tl.constexpr,
):
    """Activations as int8: groups of 32, whose largest becomes 127."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(states + row * K + at, mask=at < K, other=0.0)
    most = tl.max(tl.abs(x), 1)
    factor = tl.where(most > 0, tl.div_rn(127.0, tl.where(most > 0, most, 1.0)), 0.0)
    whole = (x * factor[:, None] + 12582912.0) - 12582912.0  # to nearest even
    tl.store(numbers + row * 32 * G + at, whole.to(tl.int8), mask=(g < G)[:, None])
    tl.store(scales + row * G + g, tl.div_rn(most, 127.0), mask=g < G)
    tl.store(sums + row * G + g, tl.sum(whole, 1), mask=g < G)


@triton.jit(do_not_specialize=["rows"])
def low_product(
    states,  # (n, K), or with WHOLE (n, 32 G) int8
    state_scales,  # (n, G), with WHOLE
    state_sums,
    numbers,  # (N, 32 G) int8, or (N, 16 G) of pairs of groups: the first's in the low halves
    scales,  # (N, G) float16
    leasts,  # (N, G) float16, with LEAST
    bias,
    out,
    rows,
    N,
    K,
    G,  # groups of a row, even
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,  # of 4 bits without a least value
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Rows times a quantized weight, two groups of 32 a time: ``scale * u + least``, as it is unpacked, in
    the type of the rows; or sums of whole numbers, exact, scaled and added up group by group."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, 32)
    here, there = m < rows, n < N
    a, b = states + m.to(tl.int64)[:, None] * K, n.to(tl.int64)
    acc = tl.zeros([M, COLUMNS], tl.float32)
    for pair in range(0, G // 2):
        if BITS == 4:
            both = tl.load(
                numbers + b[None, :] * (16 * G) + (pair * 32 + j)[:, None], mask=there[None, :], other=0
            )
        for half in tl.static_range(2):
            g = 2 * pair + half
            if BITS == 4:
                u = (((both >> 4) if half else both) & 15).to(tl.int8) - OFFSET
            else:
                u = tl.load(
                    numbers + b[None, :] * (32 * G) + (g * 32 + j)[:, None], mask=there[None, :], other=0
                )
            scale = tl.load(scales + b * G + g, mask=there, other=0.0).to(tl.float32)
            at = g * 32 + j
            x = tl.load(a + at[None, :], mask=here[:, None] & (at < K)[None, :], other=0)
            if WHOLE:
                exact = tl.dot(x, u.to(tl.int8)).to(tl.float32)
                factor = tl.load(state_scales + m * G + g, mask=here, other=0.0)
                acc += (factor[:, None] * scale[None, :]) * exact
                if LEAST:
                    least = tl.load(leasts + b * G + g, mask=there, other=0.0).to(tl.float32)
                    sums = factor * tl.load(state_sums + m * G + g, mask=here, other=0.0)
                    acc += sums[:, None] * least[None, :]
            else:
                w = scale[None, :] * u.to(tl.float32)
                if LEAST:
                    w += tl.load(leasts + b * G + g, mask=there, other=0.0).to(tl.float32)[None, :]
                acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=there, other=0.0)[None, :]
    to = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, acc, mask=here[:, None] & there[None, :])
