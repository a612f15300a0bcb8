"""A pass through a decoder's layers on a device, kernel after kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.batch import Body, LayerPass
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.ops import Addend, KernelOps
from tokenswift.kernels.cuda.plan import CudaBatch
from tokenswift.kernels.cuda.prompt import attend_prompt
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import LayerWeights, Shape

#: rows, a packed weight and a bias → their float32 product
Linear = Callable[[Tensor, Packed, Tensor | None], Tensor]


@dataclass(slots=True, eq=False)
class CudaBody(Body):
    """Layers, with the graphs of passes through them."""

    graphs: Graphs


class LayersRun:
    """One pass. What a block adds to the states is added by the norm that follows, so it is held
    back until then.

    Args:
        ops: the kernels.
        linear: products with packed weights.
        shape: of the layers.
        batch: the rows, with their tables.
        layer_pass: their states, angles and features.
    """

    def __init__(
        self,
        ops: KernelOps,
        linear: Linear,
        shape: Shape,
        batch: CudaBatch,
        layer_pass: LayerPass,
    ) -> None:
        self._ops = ops
        self._linear = linear
        self._shape = shape
        self._batch = batch
        self._pass = layer_pass
        self._cos = _by_set(layer_pass.cos)
        self._sin = _by_set(layer_pass.sin)
        self._addend: Addend | None = None
        self._queries: list[Tensor] = []

    def layer(self, number: int, layer: LayerWeights) -> None:
        """Run one layer."""
        normed = self._add_norm(layer.norm)
        self._fill_features(number)
        qkv = self._qkv(normed, layer)
        query = self._ops.append(
            self._batch,
            qkv,
            self._cos[layer.rope],
            self._sin[layer.rope],
            number,
            layer,
            self._shape,
        )
        scale = self._pass.query_scale
        if scale is not None:
            query = (query * scale[:, None, None]).to(query.dtype)
        if not self._pass.keep_queries:
            self._queries.clear()
        self._queries.append(query)
        attend = attend_prompt if self._batch.is_prompt else self._ops.attend
        attended = attend(self._batch, query, number, self._shape, layer.window).flatten(1)
        output = self._linear(attended, layer.out, layer.out_bias)
        self._addend = Addend(output, layer.out_norm, self._shape.residual)
        behind = self._add_norm(layer.mlp_norm)
        mlp_input = normed if self._shape.parallel else behind
        mlp = layer.mlp()
        gate_up = self._linear(mlp_input, mlp.gate_up, mlp.gate_up_bias)
        gated = self._ops.gated(gate_up, self._shape.weights, self._shape.gelu)
        output = self._linear(gated, mlp.down, mlp.down_bias)
        self._addend = Addend(output, layer.down_norm, self._shape.residual)

    def finish(self, layers: int) -> Float[Tensor, "L H n d"]:
        """Add what the last of so many layers adds; the queries."""
        self._add_norm(None)
        self._fill_features(layers)
        return torch.stack(self._queries).transpose(1, 2)

    def _fill_features(self, number: int) -> None:
        if self._pass.features is not None:
            self._pass.features.fill(number, self._pass.states)

    def _add_norm(self, weight: Tensor | None) -> Float[Tensor, "n D"]:
        """Add to the states what was held back; their norm."""
        return self._ops.norm(
            self._pass.states,
            weight,
            self._shape.eps,
            self._shape.weights,
            addend=self._addend,
            centred=self._shape.parallel,
        )

    def _qkv(self, normed: Float[Tensor, "n D"], layer: LayerWeights) -> Float[Tensor, "n N"]:
        """Queries, keys and values, with what a second input adds to them, and normed where a norm
        is over all heads."""
        shape = self._shape
        qkv = self._linear(normed, layer.qkv, layer.qkv_bias)
        second = self._pass.second_input
        if layer.second_qkv is not None and layer.second_norm is not None and second is not None:
            second = self._ops.norm(second, layer.second_norm, shape.eps, shape.weights)
            qkv += self._linear(second, layer.second_qkv, None)
        if not shape.norm_all_heads:
            return qkv
        query_columns = shape.heads * shape.width
        key_columns = shape.kv_heads * shape.width
        parts = qkv.split([query_columns, key_columns, key_columns], -1)
        weights = (layer.query_norm, layer.key_norm, None)
        normed_parts = [
            self._ops.norm(part.contiguous(), weight, shape.eps, part.dtype)
            for part, weight in zip(parts, weights, strict=True)
        ]
        return torch.cat(normed_parts, -1)


def _by_set(values: Float[Tensor, "*sets n half"]) -> Float[Tensor, "sets n half"]:
    return values.view(-1, *values.shape[-2:])
