"""Products of a pass: Triton kernels, or by the vendor's library where rows keep their bits in it.

The library picks its kernel by the number of rows, so rows are padded to few counts. Whether a row's bits are
then the same at every place, beside all others and at all counts is asked of the library for each shape of
weight at first use; where they are not, the Triton product with one order of sums computes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.cuda.weights import CudaPacked

logger = logging.getLogger("tokenswift")
SIZES = (16, 64, 512)  # row counts of the library's products; more rows are cut

Product = Callable[[Tensor, Tensor], Tensor]


def settle() -> None:
    """Settings of the library, for this process: no sums that are split or rounded on the way. Those in the
    environment count where the library has not been started."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.preferred_blas_library("cublaslt")


class Products:
    """Rows times weights on a device.

    Args:
        ops: the kernels, or their reference.
        library: rows and a weight (N, K) → float32 products by the vendor's library; None leaves it out.
    """

    def __init__(self, ops: Any, library: Product | None) -> None:
        self._ops, self.library = ops, library
        self._kept: dict[tuple[int, int, torch.dtype], bool] = {}  # weights in which the library keeps bits

    def linear(
        self,
        states: Float[Tensor, "n K"],
        weight: CudaPacked,
        bias: Float[Tensor, " N"] | None = None,
        whole: bool = False,
    ) -> Float[Tensor, "n N"]:
        """Rows times a weight's transpose, plus a bias; ``whole``: activations as integers."""
        return self.parts(states, weight, bias, whole, fold=True)[0]

    def parts(
        self,
        states: Float[Tensor, "n K"],
        weight: CudaPacked,
        bias: Float[Tensor, " N"] | None = None,
        whole: bool = False,
        fold: bool = False,
    ) -> Float[Tensor, "p n N"]:
        """The same in parts whose sum it is, for a kernel that adds them up as it reads them; with ``fold``
        in one."""
        fold, made, at = fold or len(weight.parts) > 1, [], 0
        for part, planes in zip(weight.parts, weight.planes, strict=True):
            own = None if bias is None else bias[at : at + part.rows]
            at += part.rows
            if planes is not None:
                taken = states.float() if whole else states.to(weight.dtype)
                made.append(self._ops.low_product(taken.contiguous(), planes, own, whole, fold))
            else:
                made.append(self._dense(states.to(part.data.dtype).contiguous(), part.data, own, fold))
        return made[0] if len(made) == 1 else torch.cat(made, 2)

    def _dense(self, states: Tensor, weight: Tensor, bias: Tensor | None, fold: bool) -> Tensor:
        if self.library is None:
            return self._ops.product(states, weight, bias, fold)
        key = (weight.shape[0], weight.shape[1], weight.dtype)
        if key not in self._kept:
            self._kept[key] = keeps_bits(self.library, weight)
            if not self._kept[key]:
                logger.info("the library's product with a weight of %d x %d, %s, keeps no bits", *key)
        if not self._kept[key]:
            return self._ops.product(states, weight, bias, fold)
        out = padded(self.library, states, weight)
        return (out if bias is None else out + bias)[None]


def padded(library: Product, states: Float[Tensor, "n K"], weight: Float[Tensor, "N K"]) -> Tensor:
    """A product whose number of rows is one of :data:`SIZES`; of more, one a part."""
    parts = []
    for rows in states.split(SIZES[-1]):
        size = next(size for size in SIZES if size >= len(rows))
        given = torch.nn.functional.pad(rows, (0, 0, 0, size - len(rows)))
        parts.append(library(given, weight)[: len(rows)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def keeps_bits(library: Product, weight: Float[Tensor, "N K"]) -> bool:
    """Whether rows of products with a weight have bits of their own: at several places, beside others, and at
    all of :data:`SIZES`."""
    made = torch.Generator().manual_seed(1)
    rows = torch.randn(SIZES[-1], weight.shape[1], generator=made, dtype=torch.float32).to(
        weight.device, weight.dtype
    )
    expected = library(rows, weight)
    for size in SIZES:
        for first in (0, 5, SIZES[-1] - size):
            count = min(size, SIZES[-1] - first)
            found = padded(library, rows[first : first + count], weight)
            if not torch.equal(found, expected[first : first + count]):
                return False
        for row in (0, 1, SIZES[-1] - 1):  # alone, at another place
            given = torch.zeros(size, weight.shape[1], device=weight.device, dtype=weight.dtype)
            given[size // 2] = rows[row]
            if not torch.equal(library(given, weight)[size // 2], expected[row]):
                return False
    return True


def cublas(states: Float[Tensor, "n K"], weight: Float[Tensor, "N K"]) -> Float[Tensor, "n N"]:
    """The vendor's product, float32."""
    if states.dtype == torch.float32:
        return states @ weight.T
    return torch.mm(states, weight.T, out_dtype=torch.float32)
