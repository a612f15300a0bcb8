"""The CUDA backend by the protocol of `kernels.base`: kernels and products put together to passes.

Passes of rows that are decoded or checked go through the kernels, each row with bits of its own. A
prompt is read by torch's attention and by products of all rows at once: that is fast, but its bits
are the chunk's. What runs through transformers' own forward has torch's attention.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tokenswift.kernels.attention import capped
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import Body, Taps
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.plan import SIZES, CudaBatch, Tables, queries_of
from tokenswift.kernels.cuda.products import Product, cublas, padded, sizes_that_keep
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape
from tokenswift.kv.memory import Arena, to_device
from tokenswift.kv.passes import Segment

logger = logging.getLogger("tokenswift")


class CudaBackend(Backend):
    """Triton kernels and cuBLASLt on a device.

    Args:
        device: where tensors are.
        ops: `launch.Kernels`; None: those of the device.
        product: rows and a weight (N, K) → their float32 product.

    Attributes:
        records: whether passes of few rows are recorded and replayed. On a CPU (Triton's
            interpreter) their buffers are used, and nothing is recorded.
    """

    name = "cuda"
    prefill_keeps_bits = False

    def __init__(
        self, device: torch.device | str = "cuda", ops: Any = None, product: Product = cublas
    ) -> None:
        super().__init__(device)
        self.decodes, self.on_host = True, False
        if ops is None:
            from tokenswift.kernels.cuda.launch import Kernels

            ops = Kernels(self.device)
        self.ops, self.records = ops, True
        self._product = product
        self._sizes: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}
        self._origin = torch.empty(64, dtype=torch.uint8, device=self.device)

    # ---- memory ----------------------------------------------------------------------------------

    def pack(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> Packed:
        """See :meth:`Backend.pack`; quantized weights become floats, and nothing needs an arena."""
        given = [weight] if isinstance(weight, Tensor | Stored) else weight
        made = Packed([self._here(part) for part in given], None, dtype)
        key = (made.rows, made.columns, made.dtype)
        if key not in self._sizes:
            self._sizes[key] = sizes_that_keep(self._product, made.data)
            if not self._sizes[key]:
                logger.warning(
                    "products with a weight of %d x %d, %s, do not keep rows' bits here: "
                    "strategies may "
                    "write different texts where two tokens are nearly as likely",
                    *key,
                )
                self.equal_bits = False
        return made

    def pack_for_drafts(self, weight: Float[Tensor, "N K"], int8: bool) -> Packed:
        """See :meth:`Backend.pack_for_drafts`; whether rows keep their bits is not asked."""
        return Packed([self._here(weight)])

    def _here(self, part: Tensor | Stored) -> Tensor:
        """A weight on the device."""
        return (part.decode() if isinstance(part, Stored) else part.detach()).to(self.device)

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """See :meth:`Backend.body`."""
        return Body(shape, weights, Graphs(self.device))

    # ---- passes ----------------------------------------------------------------------------------

    def batch(self, segments: Sequence[Segment], shape: Shape) -> CudaBatch:
        """See :meth:`Backend.batch`. A long chain alone is a prompt that is read."""
        count = sum(len(segment.tokens) for segment in segments)
        reads = len(segments) == 1 and segments[0].parents is None and count > SIZES[-1]
        recorded = self.records and count <= SIZES[-1]
        origin = self._origin.view(shape.keys)
        step = queries_of(shape.width, shape.keys.itemsize) * shape.kv_heads // shape.heads
        tables = Tables(segments, max(1, step), origin, reads)
        form = tables.form if reads else tables.form.recorded() if recorded else tables.form.whole()
        numbers = to_device(tables.numbers(form), self.device)
        return CudaBatch.over(numbers, form, segments, origin, reads, recorded)

    def layers(
        self,
        body: Body,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
        batch: CudaBatch,
        keep: bool = True,
        taps: Taps | None = None,
        beside: Float[Tensor, "n D"] | None = None,
    ) -> list[Float[Tensor, "L H m d"]]:
        """See :meth:`Backend.layers`. All segments' rows go through every kernel together.

        Raises:
            ValueError: states or angles are not of all of the batch's rows, those that fill it up
                included.
        """
        rows, angles = len(batch.tokens), cos.shape[-2]
        if not len(states) == angles == sin.shape[-2] == rows:
            raise ValueError(f"{len(states)} states and {angles} angles are of {rows} rows")
        tapped = () if taps is None else taps.layers

        def work(numbers: Tensor, states: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            over = CudaBatch.over(numbers, batch.form, batch.segments, batch.origin, batch.reads)
            own = Taps(tapped, states.new_empty(len(tapped), *states.shape))
            queries = self._layers(body, over, made := states.clone(), keep, own, *given)
            return made, queries, own.states

        given = (batch.numbers, states, cos, sin, *(() if beside is None else (beside,)))
        if batch.recorded:
            key = (batch.form, keep, tapped, len(given))
            made, queries, features = body.native.run(key, work, *given)
        else:
            made, queries, features = work(*given)
        states.copy_(made)
        if taps is not None:
            taps.states.copy_(features)
        return [queries[:, :, rows] for rows in batch.rows()]

    def _layers(
        self,
        body: Body,
        batch: CudaBatch,
        states: Tensor,
        keep: bool,
        taps: Taps,
        cos: Tensor,
        sin: Tensor,
        beside: Tensor | None = None,
    ) -> Float[Tensor, "L H n d"]:
        """The queries; the states become those behind the layers."""
        shape, ops, attend = body.shape, self.ops, self._read if batch.reads else self.ops.attend
        cos, sin = (part.view(-1, *part.shape[-2:]) for part in (cos, sin))
        linear, kept = partial(self._linear, at_once=batch.reads), list[Tensor]()
        norm = partial(ops.norm, centred=shape.parallel)
        more = behind = None  # what is to be added to the states, and the weight of its norm
        for number, layer in enumerate(body.weights):
            normed = norm(
                states, layer.norm, shape.eps, shape.weights, more, behind, shape.residual
            )
            taps.fill(number, states)
            mixed = linear(normed, layer.qkv, layer.qkv_bias)
            if layer.beside is not None and layer.beside_norm is not None and beside is not None:
                mixed += linear(
                    ops.norm(beside, layer.beside_norm, shape.eps, shape.weights), layer.beside
                )
            if shape.whole_norms:
                parts = mixed.split(
                    [shape.heads * shape.width, *[shape.kv_heads * shape.width] * 2], -1
                )
                pairs = zip(parts, (layer.query_norm, layer.key_norm, None), strict=True)
                mixed = torch.cat(
                    [ops.norm(x.contiguous(), w, shape.eps, x.dtype) for x, w in pairs], -1
                )
            query = ops.append(batch, mixed, cos[layer.rope], sin[layer.rope], number, layer, shape)
            kept = [*kept, query] if keep else [query]
            mixes = attend(batch, query, number, shape, layer.window).flatten(1)
            more = linear(mixes, layer.out, layer.out_bias)
            added = (more, layer.out_norm, shape.residual)
            after = norm(states, layer.mlp_norm, shape.eps, shape.weights, *added)
            both = linear(normed if shape.parallel else after, layer.gate_up, layer.gate_up_bias)
            gates = ops.gated(both, shape.weights, shape.gelu)
            more, behind = linear(gates, layer.down, layer.down_bias), layer.down_norm
        norm(states, None, shape.eps, shape.weights, more, behind, shape.residual)
        taps.fill(len(body.weights), states)
        return torch.stack(kept).transpose(1, 2)

    def _read(
        self, batch: CudaBatch, query: Float[Tensor, "n H d"], layer: int, shape: Shape, window: int
    ) -> Float[Tensor, "n H d"]:
        """Torch's attention of a chain's rows."""
        cache, count = batch.segments[0].cache, len(query)
        before, end = cache.length, cache.length + count
        windowed = cache.ordered and 0 < window < end
        start = max(0, before - window + 1) if windowed else 0
        keys, values = (cache.data[2 * layer + part, None, :, start:end] for part in (0, 1))
        masked, mask = windowed or shape.cap > 0, None
        if masked:
            place = torch.arange(start, end, device=self.device)
            here = place[-count:, None]
            mask = (place <= here) & (place > here - (window if windowed else end))
        groups, queries = shape.heads // shape.kv_heads, query.transpose(0, 1)[None]
        # of torch's kernels, flash alone takes fewer heads of keys; it takes neither masks nor
        # float32
        repeats = groups > 1 and (masked or query.dtype == torch.float32)
        if repeats:
            keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
        if shape.cap and mask is not None:
            bias = torch.zeros(mask.shape, device=self.device).masked_fill_(~mask, -torch.inf)
            made = capped(queries, keys, values, bias, shape.scale, shape.cap, None).to(query.dtype)
        else:
            how = {"scale": shape.scale, "enable_gqa": groups > 1 and not repeats}
            seen: Any = causal_lower_right(count, end) if mask is None else mask
            made = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, **how)
        return made[0].transpose(0, 1)

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
        self,
        states: Float[Tensor, "n K"],
        weight: Packed,
        bias: Tensor | None = None,
        at_once: bool = False,
    ) -> Float[Tensor, "n N"]:
        """``at_once``: by one product, whose bits are those of so many rows."""
        rows = states.to(weight.dtype).contiguous()
        sizes = self._sizes.get((weight.rows, weight.columns, weight.dtype)) or SIZES
        made = (
            self._product(rows, weight.data)
            if at_once
            else padded(self._product, rows, weight.data, sizes)
        )
        return made if bias is None else made + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """See :meth:`Backend.norm`."""
        rows = states.float().flatten(0, -2).contiguous()
        return self.ops.norm(rows, weight, eps, dtype).view(states.shape)
