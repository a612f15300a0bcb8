"""Starts the kernels of a layer in few launches (`fused_kernels`)."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.cuda import fused_kernels
from tokenswift.kernels.cuda.fused_reference import GROUP
from tokenswift.kernels.cuda.launch_products import INNER, ROWS, ProductKernels
from tokenswift.kernels.cuda.plan import Plan
from tokenswift.kernels.weights import LayerWeights, Shape

BLOCKS = 1 << 16  # of a product, at most: their counts are kept


class FusedKernels(ProductKernels):
    """Products of few rows that norm what they read and finish what they make; see
    `fused_reference.FusedReference`.

    Attributes:
        fused: whether they are used.
    """

    fused = True
    _counts: Tensor | None = None

    def fuses(self, shape: Shape, rows: int) -> bool:
        """See :meth:`fused_reference.FusedReference.fuses`; blocks hold whole heads and groups of squares."""
        half, columns = shape.width // 2, self.tuning.columns
        fits = columns % half == 0 and half & (half - 1) == 0 and columns % GROUP == 0
        return self.fused and fits and rows <= ROWS

    def squares(self, states: Float[Tensor, "n D"]) -> Float[Tensor, "n G"]:
        """See :meth:`fused_reference.FusedReference.squares`."""
        rows, width = states.shape
        made = states.new_empty(rows, -(-width // GROUP))
        padded = max(GROUP, triton.next_power_of_2(width))
        kernel = fused_kernels.row_squares
        self.run(kernel, (rows,), 4, 1, states=states, squares=made, D=width, DP=padded)
        return made

    def add_product(
        self,
        into: Float[Tensor, "n N"],
        squares: Float[Tensor, "n G"],
        states: Float[Tensor, "n K"],
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, " N"] | None,
    ) -> None:
        """See :meth:`fused_reference.FusedReference.add_product`."""
        given = {"into": into, "squares": squares, "N": len(weight)}
        self._start(fused_kernels.add_product, states, weight, bias, len(weight), given)

    def gate_product(
        self,
        states: Float[Tensor, "n K"],
        squares: Float[Tensor, "n G"],
        norm: Float[Tensor, " K"],
        eps: float,
        weight: Float[Tensor, "I2 K"],
        bias: Float[Tensor, " I2"] | None,
    ) -> Float[Tensor, "n I"]:
        """See :meth:`fused_reference.FusedReference.gate_product`."""
        width = len(weight) // 2
        out = states.new_empty(len(states), width, dtype=weight.dtype)
        given = {"out": out, "WIDTH": width} | _norm(squares, norm, eps)
        self._start(fused_kernels.gate_product, states, weight, bias, width, given)
        return out

    def turn_product(
        self,
        plan: Plan,
        states: Float[Tensor, "n K"],
        squares: Float[Tensor, "n G"],
        layer: LayerWeights,
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        number: int,
        shape: Shape,
    ) -> Float[Tensor, "n H d"]:
        """See :meth:`fused_reference.FusedReference.turn_product`."""
        if layer.norm is None:
            raise ValueError("the layer has no norm")
        query = plan.origin.new_empty(len(states), shape.heads, shape.width)
        given: dict[str, Any] = {
            "cos": cos,
            "sin": sin,
            "query_norm": cos if layer.query_norm is None else layer.query_norm,
            "key_norm": cos if layer.key_norm is None else layer.key_norm,
            "places": plan.places,
            "data": plan.origin,
            "query": query,
            "layer": number,
            "H": shape.heads,
            "KV": shape.kv_heads,
            "D": shape.width,
            "NORMS": layer.query_norm is not None,
        } | _norm(squares, layer.norm, shape.eps)
        weight = layer.qkv.data
        self._start(fused_kernels.turn_product, states, weight, layer.qkv_bias, len(weight) // 2, given)
        return query

    def _start(
        self, kernel: Any, states: Tensor, weight: Tensor, bias: Tensor | None, columns: int, given: Any
    ) -> None:
        """A product whose blocks are of so many ``columns`` in all; of pairs, which have twice the warps,
        where that is half of the weight's rows."""
        (rows, inner), pairs = states.shape, len(weight) // columns
        tile = ROWS * states.element_size() + pairs * self.tuning.columns * weight.element_size()
        if self._counts is None:
            self._counts = torch.zeros(BLOCKS, dtype=torch.int32, device=states.device)
        blocks = -(-columns // self.tuning.columns), -(-rows // ROWS)
        parts = self.parts(inner, blocks)
        self.run(
            kernel,
            (*blocks, parts),
            self.tuning.warps * pairs,
            max(1, min(self.tuning.stages, self.room() // (INNER * tile))),
            states=states,
            weight=weight,
            bias=weight if bias is None else bias,
            sums=weight if parts == 1 else states.new_empty(parts, rows, len(weight), dtype=torch.float32),
            counts=self._counts,
            rows=rows,
            K=inner,
            M=ROWS,
            COLUMNS=self.tuning.columns,
            INNER=INNER,
            SPLIT=self.split,
            FOLD=parts == 1,
            BIAS=bias is not None,
            **given,
        )


def _norm(squares: Tensor, norm: Tensor, eps: float) -> dict[str, Any]:
    """What a norm needs."""
    groups = triton.next_power_of_2(squares.shape[1])
    return {"squares": squares, "norm": norm, "eps": eps, "GROUPS": groups}
