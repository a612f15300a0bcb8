"""What a layer's kernels in few launches compute, in torch: the kernels apart, one after the other."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tokenswift.kernels.cuda.plan import Plan
from tokenswift.kernels.weights import LayerWeights, Shape

GROUP = 64  # columns whose squares are summed together


def tree_sum(numbers: Float[Tensor, "*m n"]) -> Float[Tensor, " *m"]:
    """Sums over the last dimension, up to a power of two: of neighbours, then of these."""
    count = numbers.shape[-1]
    numbers = pad(numbers, (0, (1 << max(0, count - 1).bit_length()) - count))
    while numbers.shape[-1] > 1:
        numbers = numbers[..., 0::2] + numbers[..., 1::2]
    return numbers[..., 0]


class FusedReference:
    """Products of few rows that norm what they read and finish what they make."""

    norm: Any
    product: Any
    append: Any
    gated: Any
    fused, split = True, 0

    def fuses(self, shape: Shape, rows: int) -> bool:
        """Whether layers of a shape, of dense weights, may go by these for so many rows."""
        return self.fused

    def squares(self, states: Float[Tensor, "n D"]) -> Float[Tensor, "n G"]:
        """Sums of the squares of each row, by groups of 64 columns."""
        groups = pad(states, (0, -states.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        return tree_sum(groups * groups)

    def add_product(
        self,
        into: Float[Tensor, "n N"],
        squares: Float[Tensor, "n G"],
        states: Float[Tensor, "n K"],
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, " N"] | None,
    ) -> None:
        """Add rows times a weight's transpose, plus a bias, to ``into``, and set ``squares`` to what
        :meth:`squares` gives for it."""
        into += self.product(states, weight, bias)[0]
        squares.copy_(self.squares(into))

    def gate_product(
        self,
        states: Float[Tensor, "n K"],
        squares: Float[Tensor, "n G"],
        norm: Float[Tensor, " K"],
        eps: float,
        weight: Float[Tensor, "I2 K"],
        bias: Float[Tensor, " I2"] | None,
    ) -> Float[Tensor, "n I"]:
        """``silu(gate) * up`` of normed rows, of the weight's type."""
        normed = self.norm(states, norm, eps, weight.dtype)
        return self.gated(self.product(normed, weight, bias), weight.dtype)

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
        """What :meth:`reference.Reference.append` makes of normed rows times a layer's first weight."""
        normed = self.norm(states, layer.norm, shape.eps, layer.qkv.data.dtype)
        mixed = self.product(normed, layer.qkv.data, layer.qkv_bias)
        norms = (shape.eps, layer.query_norm, layer.key_norm)
        return self.append(plan, mixed, cos, sin, number, shape.heads, *norms)
