"""What the kernels of a pass compute: `launch.Kernels` by Triton, tests row by row in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.cuda.plan import CudaBatch
from tokenswift.kernels.weights import LayerWeights, Shape


@dataclass(frozen=True, slots=True)
class Addend:
    """What attention or an MLP adds to the states.

    Attributes:
        values: float32.
        norm: weight of the RMS norm that they go through first; None: there is none.
        factor: what they are multiplied with.
    """

    values: Float[Tensor, "n D"]
    norm: Float[Tensor, " D"] | None = None
    factor: float = 1.0


class KernelOps(Protocol):
    """The operations of a pass. A row's bits depend on nothing but the row and its context."""

    def norm(
        self,
        states: Float[Tensor, "n D"],
        weight: Float[Tensor, " D"] | None,
        eps: float,
        dtype: torch.dtype,
        addend: Addend | None = None,
        centred: bool = False,
    ) -> Float[Tensor, "n D"]:
        """RMS norm of float32 rows in ``dtype``; without a weight the rows themselves.

        Args:
            addend: is added to the states first, in place.
            centred: the rows' means are subtracted from the states first, in place.
        """
        ...

    def gated(
        self, gate_up: Float[Tensor, "n I2"], dtype: torch.dtype, gelu: bool = False
    ) -> Float[Tensor, "n I"]:
        """``silu(gate) * up`` of float32 rows, or with GeLU, in ``dtype``."""
        ...

    def append(
        self,
        batch: CudaBatch,
        qkv: Float[Tensor, "n E"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        number: int,
        layer: LayerWeights,
        shape: Shape,
    ) -> Float[Tensor, "n H d"]:
        """Queries of float32 rows, normed and rotated; keys and values go behind those of the rows'
        caches."""
        ...

    def attend(
        self, batch: CudaBatch, query: Float[Tensor, "n H d"], layer: int, shape: Shape, window: int
    ) -> Float[Tensor, "n H d"]:
        """Attention of a layer, whose keys and values of the pass stand in the caches already."""
        ...
