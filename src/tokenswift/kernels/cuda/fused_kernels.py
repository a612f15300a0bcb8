"""The Triton kernels of a layer in few launches: products whose rows are normed as they are read, and whose
sums are finished where they are made. `fused_reference` says in torch what they compute, `launch_fused`
starts them.

The bits are those of the kernels apart (`row_kernels`, `product_kernels`). Parts of the inner dimension are
programs of their own; the one of a block that ends last adds up their sums, in their order, whoever came
when. Of a row's squares, which a norm needs whole, each block of columns leaves a sum.
"""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from tokenswift.kernels.cuda.row_kernels import tree_sum

GROUP: tl.constexpr = tl.constexpr(64)  # columns whose squares are summed together


@triton.jit
def factors(squares, m, rows, eps, D, GROUPS: tl.constexpr):
    """What a norm multiplies rows with, from the sums of their squares by groups of columns."""
    count, g = tl.cdiv(D, GROUP), tl.arange(0, GROUPS)
    inside = (m < rows)[:, None] & (g < count)[None, :]
    parts = tl.load(squares + m[:, None] * count + g[None, :], mask=inside, other=0.0)
    return 1.0 / tl.sqrt_rn(tl.div_rn(tree_sum(parts, GROUPS), D * 1.0) + eps)


@triton.jit
def block_sums(
    states,
    factor,
    norm,
    weight,
    bias,
    sums,
    counts,
    m,
    n,  # rows of the weight
    there,
    rows,
    N,
    K,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,
    BIAS: tl.constexpr,
    NORMED: tl.constexpr,
    APART: tl.constexpr,  # rows of the weight between those and the others of a pair; 0: there are none
):
    """Sums of a block, with ``APART`` of two; and whether they are all, and this program's to finish."""
    k, first = tl.arange(0, INNER), tl.program_id(2) * SPLIT
    a, b = states + m.to(tl.int64)[:, None] * K, weight + n.to(tl.int64)[None, :] * K
    x, y = tl.zeros([M, COLUMNS], tl.float32), tl.zeros([M, COLUMNS], tl.float32)
    for part in range(first, K if FOLD else first + 1, SPLIT):
        acc, other = tl.zeros([M, COLUMNS], tl.float32), tl.zeros([M, COLUMNS], tl.float32)
        for start in range(part, tl.minimum(part + SPLIT, K), INNER):
            at = start + k
            row = tl.load(a + at[None, :], mask=(m < rows)[:, None] & (at < K)[None, :], other=0.0)
            if NORMED:
                by = tl.load(norm + at, mask=at < K, other=0.0)
                row = (row * factor[:, None] * by[None, :]).to(weight.dtype.element_ty)
            inside = there[None, :] & (at < K)[:, None]
            acc = tl.dot(row, tl.load(b + at[:, None], mask=inside, other=0.0), acc, input_precision="ieee")
            if APART > 0:
                w = tl.load(b + APART * K + at[:, None], mask=inside, other=0.0)
                other = tl.dot(row, w, other, input_precision="ieee")
        if BIAS:
            last = there & (part + SPLIT >= K)
            acc += tl.load(bias + n, mask=last, other=0.0)[None, :]
            if APART > 0:
                other += tl.load(bias + APART + n, mask=last, other=0.0)[None, :]
        x += acc
        y += other
    whole = True
    if not FOLD:
        inside = (m < rows)[:, None] & there[None, :]
        to = sums + m.to(tl.int64)[:, None] * N + n[None, :]
        size = rows.to(tl.int64) * N
        tl.store(to + tl.program_id(2) * size, x, mask=inside)
        if APART > 0:
            tl.store(to + tl.program_id(2) * size + APART, y, mask=inside)
        tl.debug_barrier()
        count = counts + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        whole = tl.atomic_add(count, 1, sem="acq_rel") == tl.num_programs(2) - 1
        if whole:
            tl.store(count, 0)  # for the next product
            x, y = tl.zeros([M, COLUMNS], tl.float32), tl.zeros([M, COLUMNS], tl.float32)
            for part in range(tl.num_programs(2)):
                x += tl.load(to + part * size, mask=inside, other=0.0, cache_modifier=".cg")
                if APART > 0:
                    y += tl.load(to + part * size + APART, mask=inside, other=0.0, cache_modifier=".cg")
    return x, y, whole


@triton.jit
def row_squares(states, squares, D: tl.constexpr, DP: tl.constexpr):
    """Sums of a row's squares, of a group of columns each."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    x = tl.load(states + row * D + d, mask=d < D, other=0.0)
    g = tl.arange(0, DP // GROUP)
    made = tree_sum(tl.reshape(x * x, [DP // GROUP, GROUP]), GROUP)
    tl.store(squares + row * tl.cdiv(D, GROUP) + g, made, mask=g < tl.cdiv(D, GROUP))


@triton.jit(do_not_specialize=["rows"])
def add_product(
    states,  # (n, K)
    weight,  # (N, K)
    bias,
    sums,  # (parts, n, N) float32, scratch
    counts,  # (blocks) int32, 0 before and after
    into,  # (n, N) float32, to which the product is added
    squares,  # (n, N / 64) float32, out
    rows,
    N,
    K,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A product added to rows, and the sums of their squares."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x, _, whole = block_sums(
        states, states, states, weight, bias, sums, counts, m, n, n < N, rows, N, K,
        M, COLUMNS, INNER, SPLIT, FOLD, BIAS, False, 0,
    )  # fmt: skip
    if whole:
        at, inside = into + m.to(tl.int64)[:, None] * N + n[None, :], (m < rows)[:, None] & (n < N)[None, :]
        x = tl.load(at, mask=inside, other=0.0) + x
        tl.store(at, x, mask=inside)
        x = tl.where(inside, x, 0.0)
        i = tl.arange(0, M * (COLUMNS // GROUP))
        row = tl.program_id(1) * M + i // (COLUMNS // GROUP)
        g = tl.program_id(0) * (COLUMNS // GROUP) + i % (COLUMNS // GROUP)
        made = tree_sum(tl.reshape(x * x, [M * (COLUMNS // GROUP), GROUP]), GROUP)
        tl.store(squares + row * tl.cdiv(N, GROUP) + g, made, mask=(row < rows) & (g < tl.cdiv(N, GROUP)))


@triton.jit(do_not_specialize=["rows"])
def gate_product(
    states,  # (n, K) float32, before the norm
    squares,
    norm,  # (K)
    weight,  # (2 I, K): gate, then up
    bias,
    sums,
    counts,
    out,  # (n, I)
    rows,
    K,
    eps,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # I
):
    """``silu(gate) * up`` of normed rows."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    factor = factors(squares, m, rows, eps, K, GROUPS)
    x, up, whole = block_sums(
        states, factor, norm, weight, bias, sums, counts, m, n, n < WIDTH, rows, 2 * WIDTH, K,
        M, COLUMNS, INNER, SPLIT, FOLD, BIAS, True, WIDTH,
    )  # fmt: skip
    if whole:
        y = tl.div_rn(x, 1.0 + tl.exp(-x)) * up
        inside = (m < rows)[:, None] & (n < WIDTH)[None, :]
        to = out + m.to(tl.int64)[:, None] * WIDTH + n[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "layer"])
def turn_product(
    states,  # (n, K) float32, before the norm
    squares,
    norm,
    weight,  # ((H + 2 KV) D, K)
    bias,
    sums,
    counts,
    cos,
    sin,
    query_norm,
    key_norm,
    places,
    data,
    query,  # (n, H, D) out
    rows,
    K,
    eps,
    layer,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Queries, keys and values of normed rows, normed and turned; keys and values go behind those of the
    rows' caches."""
    half: tl.constexpr = D // 2
    heads: tl.constexpr = COLUMNS // half
    m = tl.program_id(1) * M + tl.arange(0, M)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head, d = c // half, c % half
    there = head < H + 2 * KV
    factor = factors(squares, m, rows, eps, K, GROUPS)
    x, y, whole = block_sums(
        states, factor, norm, weight, bias, sums, counts, m, head * D + d, there, rows, (H + 2 * KV) * D, K,
        M, COLUMNS, INNER, SPLIT, FOLD, BIAS, True, half,
    )  # fmt: skip
    if whole:
        m64, turns = m.to(tl.int64), (there & (head < H + KV))[None, :]
        if NORMS:
            both = tree_sum(tl.reshape(x * x, [M * heads, half]), half)
            both += tree_sum(tl.reshape(y * y, [M * heads, half]), half)
            by = 1.0 / tl.sqrt_rn(tl.div_rn(both, D * 1.0) + eps)
            by = tl.reshape(tl.broadcast_to(by[:, None], [M * heads, half]), [M, COLUMNS])
            at = tl.where(head < H, query_norm, key_norm) + d
            x = tl.where(turns, x * by * tl.load(at, mask=there, other=0.0)[None, :], x)
            y = tl.where(turns, y * by * tl.load(at + half, mask=there, other=0.0)[None, :], y)
        mask = (m < rows)[:, None] & turns
        cs = tl.load(cos + m64[:, None] * half + d[None, :], mask=mask, other=0.0)
        sn = tl.load(sin + m64[:, None] * half + d[None, :], mask=mask, other=0.0)
        x, y = tl.where(turns, x * cs - y * sn, x), tl.where(turns, y * cs + x * sn, y)
        own = (m < rows)[:, None] & (head < H)[None, :]
        to = query + (m64[:, None] * H + head[None, :]) * D + d[None, :]
        tl.store(to, x.to(query.dtype.element_ty), mask=own)
        tl.store(to + half, y.to(query.dtype.element_ty), mask=own)
        offset = tl.load(places + m64 * 6, mask=m < rows, other=0)
        capacity = tl.load(places + m64 * 6 + 1, mask=m < rows, other=0)
        slot = tl.load(places + m64 * 6 + 2, mask=m < rows, other=-1)
        number = tl.maximum(head - H, 0)
        plane = (2 * layer.to(tl.int64) + number // KV) * KV + number % KV
        into = data + offset[:, None] + (plane[None, :] * capacity[:, None] + slot[:, None]) * D + d[None, :]
        kept = (slot >= 0)[:, None] & (there & (head >= H))[None, :]
        tl.store(into, x.to(query.dtype.element_ty), mask=kept)
        tl.store(into + half, y.to(query.dtype.element_ty), mask=kept)
