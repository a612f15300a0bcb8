"""Products of rows with a weight.

cuBLASLt picks its kernel by the number of rows, so rows are filled up to few counts. Whether a
row's bits are then the same at every place, beside all others and at both counts, is asked of each
shape of weight when it is packed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tokenswift.kernels.cuda.plan import SIZES

Product = Callable[[Tensor, Tensor], Tensor]


def settle() -> None:
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
    product: Product, states: Tensor, weight: Tensor, sizes: tuple[int, ...] = SIZES
) -> Tensor:
    """A product whose number of rows is one of ``sizes``; of more rows than the last, one a
    part."""
    parts = []
    for rows in states.split(sizes[-1]):
        size = next(size for size in sizes if size >= len(rows))
        given = rows if size == len(rows) else pad(rows, (0, 0, 0, size - len(rows)))
        parts.append(product(given, weight)[: len(rows)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def products_keep_bits(
    product: Product, weight: Float[Tensor, "N K"], sizes: tuple[int, ...]
) -> bool:
    """Whether rows have bits of their own: alone, at several places, beside others, at all of some
    counts."""
    most, made = sizes[-1], torch.Generator().manual_seed(1)
    rows = torch.randn(most, weight.shape[1], generator=made, dtype=torch.float32)
    rows = rows.to(weight.device, weight.dtype)
    expected = product(rows, weight)
    for size in sizes:
        for first in (0, 5, most - size):
            part = slice(first, min(most, first + size))
            if not torch.equal(padded(product, rows[part], weight, (size,)), expected[part]):
                return False
        for row in (0, 1, most - 1):  # alone, at another place
            given = torch.zeros_like(rows[:size])
            given[size // 2] = rows[row]
            if not torch.equal(product(given, weight)[size // 2], expected[row]):
                return False
    return True


def sizes_that_keep(product: Product, weight: Float[Tensor, "N K"]) -> tuple[int, ...]:
    """The row counts at which products with a weight keep rows' bits: all of :data:`SIZES`, the
    last alone, or none."""
    return next(
        (sizes for sizes in (SIZES, SIZES[-1:]) if products_keep_bits(product, weight, sizes)), ()
    )
