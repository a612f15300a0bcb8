"""The Triton kernels of a pass's rows between products and attention: norms, rotary positions, gates; and the
move of a cache's entries. `reference` says in torch what they compute, `launch` starts them. Rows are each by
themselves.
"""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summed(at, inside, size, PARTS: tl.constexpr):
    """The parts of a product's sums, which stand ``size`` numbers apart, added in their order."""
    x = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * size, mask=inside, other=0.0)
    return x


@triton.jit
def tree_sum(x, N: tl.constexpr):
    """Sums of rows (M, N) of a power of two of numbers: of neighbours, then of these, so that one order is
    that of every shape and of any number of warps."""
    M: tl.constexpr = x.shape[0]
    for level in tl.static_range(1, 20):
        if N >> level > 0:
            a, b = tl.split(tl.reshape(x, [M, N >> level, 2]))
            x = a + b
    return tl.reshape(x, [M])


@triton.jit
def add_norm(
    states,  # (n, D) float32
    more,  # (PARTS, n, D) float32, whose sum is added to them in place
    weight,
    out,
    eps,
    D: tl.constexpr,
    DP: tl.constexpr,
    PARTS: tl.constexpr,  # 0: nothing is added
):
    """RMS norm of a row, of the type of ``out``; what a block gave is added first."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    inside = d < D
    x = tl.load(states + row * D + d, mask=inside, other=0.0)
    if PARTS > 0:
        x += summed(more + row * D + d, inside, tl.num_programs(0).to(tl.int64) * D, PARTS)
        tl.store(states + row * D + d, x, mask=inside)
    squares = tl.sum(tree_sum((x * x)[None, :], DP), 0)  # of one
    factor = 1.0 / tl.sqrt_rn(tl.div_rn(squares, D * 1.0) + eps)
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
    PARTS: tl.constexpr,
):
    """Both halves of a head of a row, queries and keys normed and turned; see `turn_append`."""
    half: tl.constexpr = D // 2
    inside = d < half
    at = mixed + (row * (H + 2 * KV) + head) * D + d
    size = tl.num_programs(0).to(tl.int64) * (H + 2 * KV) * D
    x, y = summed(at, inside, size, PARTS), summed(at + half, inside, size, PARTS)
    if head < H + KV:
        if NORMS:
            HALF: tl.constexpr = d.shape[0]
            squares = tree_sum((x * x)[None, :], HALF) + tree_sum((y * y)[None, :], HALF)
            factor = 1.0 / tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), D * 1.0) + eps)
            norm = tl.where(head < H, query_norm, key_norm) + d
            x = x * factor * tl.load(norm, mask=inside, other=0.0)
            y = y * factor * tl.load(norm + half, mask=inside, other=0.0)
        c = tl.load(cos + row * half + d, mask=inside, other=0.0)
        s = tl.load(sin + row * half + d, mask=inside, other=0.0)
        x, y = x * c - y * s, y * c + x * s
    return x, y


@triton.jit(do_not_specialize=["layer"])
def turn_append(
    mixed,  # (PARTS, n, (H + 2 KV) D) float32: queries, keys and values
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
    PARTS: tl.constexpr,
):
    """Norm and turn the queries and keys of a row; put keys and values behind those of its cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    inside = d < half
    x, y = turned(mixed, cos, sin, query_norm, key_norm, row, head, d, eps, H, KV, D, NORMS, PARTS)
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
    both,  # (PARTS, n, 2 I) float32: gate, then up
    out,  # (n, I)
    inner,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``silu(gate) * up``, or with ``GELU`` its tanh form of the gate."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    size = tl.num_programs(0).to(tl.int64) * 2 * inner
    x = summed(both + row * 2 * inner + i, inside, size, PARTS)
    up = summed(both + row * 2 * inner + inner + i, inside, size, PARTS)
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
