"""The CUDA backend by the protocol of `kernels.base`: kernels and products put together to passes.

Passes of rows that are decoded or checked go through the kernels, each row with bits of its own. A
prompt is read by torch's attention and by products of all rows at once: that is fast, but its bits
are the chunk's. What runs through transformers' own forward has torch's attention.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import Body, LayerFeatures, LayerPass
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.layers import CudaBody, LayersRun
from tokenswift.kernels.cuda.ops import KernelOps
from tokenswift.kernels.cuda.plan import ROW_COUNTS, CudaBatch, Tables, block_rows_of
from tokenswift.kernels.cuda.products import Product, counts_that_keep_bits, cublas, padded
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import LayerWeights, Shape
from tokenswift.kv.memory import Arena, to_device
from tokenswift.kv.passes import Segment

logger = logging.getLogger("tokenswift")


class CudaBackend(Backend):
    """Triton kernels and cuBLASLt on a device.

    Args:
        device: where tensors are.
        ops: the kernels; None: Triton's on the device.
        product: rows and a weight (N, K) → their float32 product.

    Attributes:
        records: whether passes of few rows are recorded and replayed. On a CPU (Triton's
            interpreter) their buffers are used, and nothing is recorded.
    """

    name = "cuda"
    mixtures = False
    recurrences = False
    prefill_keeps_bits = False

    def __init__(
        self,
        device: torch.device | str = "cuda",
        ops: KernelOps | None = None,
        product: Product = cublas,
    ) -> None:
        super().__init__(device)
        self.decodes = True
        self.on_host = False
        if ops is None:
            from tokenswift.kernels.cuda.launch import Kernels

            ops = Kernels(self.device)
        self.ops = ops
        self.records = True
        self._product = product
        #: for each shape and type of a weight, the row counts at which its products keep bits
        self._row_counts: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}
        self._origin = torch.empty(64, dtype=torch.uint8, device=self.device)

    # ---- memory ----------------------------------------------------------------------------------

    def pack(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> Packed:
        """See :meth:`Backend.pack`; quantized weights become floats, and nothing needs an arena."""
        weights = [weight] if isinstance(weight, Tensor | Stored) else weight
        packed = Packed([self._on_device(each) for each in weights], None, dtype)
        key = (packed.rows, packed.columns, packed.dtype)
        if key not in self._row_counts:
            self._row_counts[key] = counts_that_keep_bits(self._product, packed.data)
            if not self._row_counts[key]:
                logger.warning(
                    "products with a weight of %d x %d, %s, do not keep rows' bits here: "
                    "strategies may "
                    "write different texts where two tokens are nearly as likely",
                    packed.rows,
                    packed.columns,
                    packed.dtype,
                )
                self.equal_bits = False
        return packed

    def pack_for_drafts(self, weight: Float[Tensor, "N K"], int8: bool) -> Packed:
        """See :meth:`Backend.pack_for_drafts`; whether rows keep their bits does not matter."""
        return Packed([self._on_device(weight)])

    def _on_device(self, weight: Tensor | Stored) -> Tensor:
        dense = weight.decode() if isinstance(weight, Stored) else weight.detach()
        return dense.to(self.device)

    def body(self, shape: Shape, weights: list[LayerWeights]) -> CudaBody:
        """See :meth:`Backend.body`.

        Raises:
            ValueError: a layer has experts, of which there is no kernel here.
        """
        if any(layer.experts is not None for layer in weights):
            raise ValueError("a layer has experts; valid: layers with an MLP alone (`mixtures`)")
        return CudaBody(shape, weights, Graphs(self.device))

    # ---- passes ----------------------------------------------------------------------------------

    def batch(self, segments: Sequence[Segment], shape: Shape) -> CudaBatch:
        """See :meth:`Backend.batch`. A long chain alone is a prompt that is read."""
        count = sum(len(segment.tokens) for segment in segments)
        few = count <= ROW_COUNTS[-1]
        is_prompt = len(segments) == 1 and segments[0].parents is None and not few
        recorded = self.records and few
        origin = self._origin.view(shape.keys)
        tables = Tables(segments, block_rows_of(shape), origin, is_prompt)
        sizes = tables.sizes
        if recorded:
            sizes = sizes.recorded()
        elif not is_prompt:
            sizes = sizes.padded()
        return CudaBatch.from_numbers(
            to_device(tables.numbers(sizes), self.device),
            sizes,
            segments,
            origin,
            is_prompt=is_prompt,
            recorded=recorded,
        )

    def layers(self, body: Body, layer_pass: LayerPass) -> list[Float[Tensor, "L H m d"]]:
        """See :meth:`Backend.layers`. All segments' rows go through every kernel together.

        Raises:
            TypeError: another backend has prepared the layers or the batch.
            ValueError: states or angles are not of all of the batch's rows, those that fill it up
                included.
        """
        batch = layer_pass.batch
        if not isinstance(body, CudaBody) or not isinstance(batch, CudaBatch):
            raise TypeError(
                f"a pass of a {type(batch).__name__} through a {type(body).__name__}; valid: those "
                "of `CudaBackend.batch` and `CudaBackend.body`"
            )
        _check_rows(layer_pass)
        keep_queries = layer_pass.keep_queries
        features = layer_pass.features
        feature_layers = () if features is None else features.layers

        def work(
            numbers: Tensor,
            states: Tensor,
            cos: Tensor,
            sin: Tensor,
            second: Tensor | None = None,
            query_scale: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            states = states.clone()
            copies = states.new_empty(len(feature_layers), *states.shape)
            tables = batch.with_numbers(numbers)
            over_buffers = LayerPass(
                batch=tables,
                states=states,
                cos=cos,
                sin=sin,
                keep_queries=keep_queries,
                features=LayerFeatures(feature_layers, copies),
                second_input=second,
                query_scale=query_scale,
            )
            queries = self._run(body, tables, over_buffers)
            return states, queries, copies

        inputs = _inputs(batch, layer_pass)
        if batch.recorded:
            key = (batch.sizes, keep_queries, feature_layers, tuple(inputs))
            states, queries, copies = body.graphs.run(key, work, inputs)
        else:
            states, queries, copies = work(**inputs)
        layer_pass.states.copy_(states)
        if features is not None:
            features.states.copy_(copies)
        return [queries[:, :, rows] for rows in batch.rows()]

    def _run(
        self, body: CudaBody, batch: CudaBatch, layer_pass: LayerPass
    ) -> Float[Tensor, "L H n d"]:
        """The queries; the states become those behind the layers, and features are filled."""
        linear = self._linear_at_once if batch.is_prompt else self._linear
        run = LayersRun(self.ops, linear, body.shape, batch, layer_pass)
        for number, layer in enumerate(body.weights):
            run.layer(number, layer)
        return run.finish(len(body.weights))

    def linear(
        self,
        states: Float[Tensor, "*m K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "*m N"]:
        """See :meth:`Backend.linear`; of floats alone."""
        return self._linear(states.flatten(0, -2), weight, bias).view(*states.shape[:-1], -1)

    def _linear(
        self, states: Float[Tensor, "n K"], weight: Packed, bias: Tensor | None
    ) -> Float[Tensor, "n N"]:
        """By products of row counts that keep bits."""
        rows = states.to(weight.dtype).contiguous()
        known = self._row_counts.get((weight.rows, weight.columns, weight.dtype))
        out = padded(self._product, rows, weight.data, known or ROW_COUNTS)
        return out if bias is None else out + bias

    def _linear_at_once(
        self, states: Float[Tensor, "n K"], weight: Packed, bias: Tensor | None
    ) -> Float[Tensor, "n N"]:
        """By one product, whose bits are those of so many rows."""
        out = self._product(states.to(weight.dtype).contiguous(), weight.data)
        return out if bias is None else out + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """See :meth:`Backend.norm`."""
        rows = states.float().flatten(0, -2).contiguous()
        return self.ops.norm(rows, weight, eps, dtype).view(states.shape)


def _inputs(batch: CudaBatch, layer_pass: LayerPass) -> dict[str, Tensor]:
    """The tensors that a recorded pass reads."""
    inputs = {
        "numbers": batch.numbers,
        "states": layer_pass.states,
        "cos": layer_pass.cos,
        "sin": layer_pass.sin,
    }
    if layer_pass.second_input is not None:
        inputs["second"] = layer_pass.second_input
    if layer_pass.query_scale is not None:
        inputs["query_scale"] = layer_pass.query_scale
    return inputs


def _check_rows(layer_pass: LayerPass) -> None:
    rows = len(layer_pass.batch.tokens)
    states = len(layer_pass.states)
    cos = layer_pass.cos.shape[-2]
    sin = layer_pass.sin.shape[-2]
    if not states == cos == sin == rows:
        raise ValueError(f"{states} states and {cos} angles are of {rows} rows")
