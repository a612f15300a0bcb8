"""Products of rows with a weight.

cuBLASLt picks its kernel by the number of rows, so rows are filled up to few counts. Whether a
row's bits are then the same at every place, beside all others and at both counts, is tried with
each shape of weight when it is packed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tokenswift.kernels.cuda.plan import ROW_COUNTS

Product = Callable[[Tensor, Tensor], Tensor]


def set_blas_flags() -> None:
    """Settings of the library, for this process: no sums that are split or rounded on the way.
    Those in the environment count where the library has not been started."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.preferred_blas_library("cublaslt")


def cublas(states: Float[Tensor, "n K"], weight: Float[Tensor, "N K"]) -> Float[Tensor, "n N"]:
    """Rows times a weight's transpose, float32."""
    if states.dtype == torch.float32:
        return states @ weight.T
    return torch.mm(states, weight.T, out_dtype=torch.float32)


def padded(
    product: Product, states: Tensor, weight: Tensor, counts: tuple[int, ...] = ROW_COUNTS
) -> Tensor:
    """A product whose number of rows is one of ``counts``; more rows than the last are multiplied
    part by part."""
    parts: list[Tensor] = []
    for rows in states.split(counts[-1]):
        count = next(count for count in counts if count >= len(rows))
        if count > len(rows):
            filled = pad(rows, (0, 0, 0, count - len(rows)))
            parts.append(product(filled, weight)[: len(rows)])
        else:
            parts.append(product(rows, weight))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def products_keep_bits(
    product: Product, weight: Float[Tensor, "N K"], counts: tuple[int, ...]
) -> bool:
    """Whether rows have bits of their own: alone, at several places, beside others, at all of some
    counts."""
    most = counts[-1]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(most, weight.shape[1], generator=generator, dtype=torch.float32)
    rows = rows.to(weight.device, weight.dtype)
    expected = product(rows, weight)
    for count in counts:
        for first in (0, 5, most - count):
            part = slice(first, min(most, first + count))
            if not torch.equal(padded(product, rows[part], weight, (count,)), expected[part]):
                return False
        for row in (0, 1, most - 1):
            alone = torch.zeros_like(rows[:count])
            place = count // 2  # another one than the row's own
            alone[place] = rows[row]
            if not torch.equal(product(alone, weight)[place], expected[row]):
                return False
    return True


def counts_that_keep_bits(product: Product, weight: Float[Tensor, "N K"]) -> tuple[int, ...]:
    """The row counts at which products with a weight keep rows' bits: all of :data:`ROW_COUNTS`,
    the last alone, or none."""
    for counts in (ROW_COUNTS, ROW_COUNTS[-1:]):
        if products_keep_bits(product, weight, counts):
            return counts
    return ()
