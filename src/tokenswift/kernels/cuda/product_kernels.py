"""The Triton kernels of products. `reference` says in torch what they compute, `launch` starts them.

The inner dimension is cut into parts of one size, each a chain of its own; sums of parts are added in their
order, by the program that made them all (``FOLD``) or by the kernel that reads them: the same bits. So a sum
is one order of additions, whatever the number of rows, and none is compiled with contraction of products and
sums.
"""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def product(
    states,  # (n, K)
    weight,  # (N, K)
    bias,  # (N) float32
    out,  # (parts, n, N) float32, or with FOLD (n, N)
    rows,
    N,
    K,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,  # numbers of a part of the inner dimension
    FOLD: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Rows times the weight's transpose; the last part has the bias."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    a = states + m.to(tl.int64)[:, None] * K
    b = weight + n.to(tl.int64)[None, :] * K
    first = tl.program_id(2) * SPLIT
    total = tl.zeros([M, COLUMNS], tl.float32)
    for part in range(first, K if FOLD else first + 1, SPLIT):
        acc = tl.zeros([M, COLUMNS], tl.float32)
        for start in range(part, tl.minimum(part + SPLIT, K), INNER):
            at = start + k
            x = tl.load(a + at[None, :], mask=(m < rows)[:, None] & (at < K)[None, :], other=0.0)
            w = tl.load(b + at[:, None], mask=(n < N)[None, :] & (at < K)[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + n, mask=(n < N) & (part + SPLIT >= K), other=0.0)[None, :]
        total += acc  # also of one part: from 0, so that no sum is -0
    to = out + (tl.program_id(2) * rows + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, total, mask=(m < rows)[:, None] & (n < N)[None, :])


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
    out,  # as of `product`
    rows,
    N,
    K,
    G,  # groups of a row, even
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,  # of groups, in a part of the inner dimension: a multiple of
    STEP: tl.constexpr,  # pairs of a step
    FOLD: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,  # of 4 bits without a least value
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Rows times a quantized weight, groups of 32 in pairs: ``scale * u + least``, as it is unpacked, in
    the type of the rows; or sums of integers, exact, scaled and added up group by group."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, 32)
    here, there = m < rows, n < N
    a, b = states + m.to(tl.int64)[:, None] * K, n.to(tl.int64)
    first = tl.program_id(2) * PAIRS
    total = tl.zeros([M, COLUMNS], tl.float32)
    for part in range(first, G // 2 if FOLD else first + 1, PAIRS):
        acc = tl.zeros([M, COLUMNS], tl.float32)
        for step in range(part, tl.minimum(part + PAIRS, G // 2), STEP):
            for ahead in tl.static_range(STEP):  # so that several loads are on their way
                pair = step + ahead
                some = there & (pair < G // 2)
                if BITS == 4:
                    both = tl.load(
                        numbers + b[None, :] * (16 * G) + (pair * 32 + j)[:, None],
                        mask=some[None, :],
                        other=0,
                    )
                for half in tl.static_range(2):
                    g = 2 * pair + half
                    if BITS == 4:
                        u = (((both >> 4) if half else both) & 15).to(tl.int8) - OFFSET
                    else:
                        u = tl.load(
                            numbers + b[None, :] * (32 * G) + (g * 32 + j)[:, None],
                            mask=some[None, :],
                            other=0,
                        )
                    scale = tl.load(scales + b * G + g, mask=some, other=0.0).to(tl.float32)
                    at = g * 32 + j
                    x = tl.load(a + at[None, :], mask=here[:, None] & (at < K)[None, :], other=0)
                    if WHOLE:
                        exact = tl.dot(x, u.to(tl.int8)).to(tl.float32)
                        factor = tl.load(state_scales + m * G + g, mask=here & (pair < G // 2), other=0.0)
                        acc += (factor[:, None] * scale[None, :]) * exact
                        if LEAST:
                            least = tl.load(leasts + b * G + g, mask=some, other=0.0).to(tl.float32)
                            sums = factor * tl.load(
                                state_sums + m * G + g, mask=here & (pair < G // 2), other=0.0
                            )
                            acc += sums[:, None] * least[None, :]
                    else:
                        w = scale[None, :] * u.to(tl.float32)
                        if LEAST:
                            w += tl.load(leasts + b * G + g, mask=some, other=0.0).to(tl.float32)[None, :]
                        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
        if BIAS:
            last = part + PAIRS >= G // 2
            acc += tl.load(bias + n, mask=there & last, other=0.0)[None, :]
        total += acc  # also of one part: from 0, so that no sum is -0
    to = out + (tl.program_id(2) * rows + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, total, mask=here[:, None] & there[None, :])
