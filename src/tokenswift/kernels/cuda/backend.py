"""The CUDA backend by the protocol of `kernels.base`: kernels and products put together to passes.

The same code runs eagerly on CPU tensors, with the kernels' torch reference in their place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.interfaces import KVCache, Pass, Segment
from tokenswift.kernels.base import Backend, Batch, Body, Taps, part_of
from tokenswift.kernels.cuda.choose import DeviceRanker
from tokenswift.kernels.cuda.entries import WIDEST, IntFullCache, IntSparseCache, entry_bytes
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.plan import RECORDED, Form, Plan, Tables, plan_of
from tokenswift.kernels.cuda.prepare import prepare
from tokenswift.kernels.cuda.products import Product, Products
from tokenswift.kernels.cuda.reference import Reference, summed
from tokenswift.kernels.cuda.weights import KEPT, CudaPacked
from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.torch import TorchBackend
from tokenswift.kernels.weights import LayerWeights, Packed, Shape
from tokenswift.kv.full import FullCache
from tokenswift.kv.pages import Arena, to_device
from tokenswift.kv.sparse import SparseCache
from tokenswift.sampling.adjust import NO_RULES, TextRules

RANKINGS = 64  # that are kept recorded, of sampling parameters that come from strangers, too
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)  # of keys and values


@dataclass(slots=True, kw_only=True)
class CudaBatch(Batch):
    """A batch with its plan."""

    plan: Plan

    @classmethod
    def of(
        cls, numbers: Tensor, sizes: Form, segments: Sequence[Segment], origin: Tensor, form: Hashable
    ) -> CudaBatch:
        """The batch whose tokens, positions and tables of some sizes stand in ``numbers``."""
        tokens, positions, tables = numbers.split([sizes.rows, sizes.rows, len(numbers) - 2 * sizes.rows])
        plan = Plan.over(tables, sizes, segments, origin)
        own = None if form is None else numbers
        return cls(segments, tokens, positions, form, own, plan=plan)

    def over(self, numbers: Int[Tensor, " m"]) -> CudaBatch:
        """See :meth:`Batch.over`."""
        return self.of(numbers, self.plan.form, self.segments, self.plan.origin, self.form)

    def passes(
        self,
        states: Float[Tensor, "n D"],
        queries: Float[Tensor, "L H n d"],
        features: Float[Tensor, "k n D"] | None = None,
    ) -> list[Pass]:
        """See :meth:`Batch.passes`."""
        return [Pass(states[rows], queries[:, :, rows], part_of(features, rows)) for rows in self.rows()]


class CudaBackend(Backend):
    """Triton kernels on a device; their reference where none are given.

    Args:
        device: where tensors are.
        ops: `launch.Kernels`, or None for `reference.Reference`.
        library: products by the vendor's library, `products.cublas`; None: by the kernels.

    Attributes:
        graphs: record passes of few rows and replay them. On a CPU their buffers are used, and nothing is
            recorded.
        int8_keys: whether keys and values may be int8.
        prepares: compile the kernels of each model when it is loaded.
    """

    name = "cuda"
    fused = True
    formats = KEPT
    prefill_rows = 2048

    def __init__(
        self, device: torch.device | str = "cuda", ops: Any = None, library: Product | None = None
    ) -> None:
        super().__init__(device)
        self.ops: Any = Reference() if ops is None else ops
        self._products = Products(self.ops, library)
        self._origin = torch.empty(64, dtype=torch.uint8, device=self.device)
        self.graphs = self.int8_keys = True
        self.prepares = False
        self._rankings: Graphs | None = None

    def pack(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> Packed:
        """See :meth:`Backend.pack`; a card's memory needs no arena."""
        return CudaPacked(weight, dtype, self.device)

    def new_cache(
        self, layers: int, kv_heads: int, width: int, capacity: int, dtype: torch.dtype
    ) -> FullCache:
        """See :meth:`Backend.new_cache`. A kernel moves the entries of an accepted path."""
        move = self.ops.move if dtype in TYPES else None
        if dtype == torch.int8:
            return IntFullCache(layers, kv_heads, width, capacity, self.device, move)
        return FullCache(layers, kv_heads, width, capacity, dtype, self.device, move)

    def has_int8_keys(self, width: int) -> bool:
        """See :meth:`Backend.has_int8_keys`."""
        return self.int8_keys and width % 4 == 0 and width <= WIDEST

    def entry_bytes(self, width: int, dtype: torch.dtype) -> int:
        """See :meth:`Backend.entry_bytes`."""
        return entry_bytes(width) if dtype == torch.int8 else super().entry_bytes(width, dtype)

    def partial_cache(self, full: FullCache, budget: int, sinks: int, scratch: int) -> SparseCache:
        """See :meth:`Backend.partial_cache`."""
        kind = IntSparseCache if isinstance(full, IntFullCache) else SparseCache
        return kind(full, budget, sinks, scratch)

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """See :meth:`Backend.body`."""
        made = Body(shape, weights)
        if self.prepares:
            prepare(self, made)
        return made

    def batch(self, segments: Sequence[Segment], shape: Shape) -> CudaBatch:
        """See :meth:`Backend.batch`. Passes of few rows may be recorded, and replayed as a text grows."""
        data, count = segments[0].cache.data, sum(len(segment.tokens) for segment in segments)
        recorded = self.graphs and count <= RECORDED[-1]
        origin = self._origin.view(data.dtype) if recorded else data
        tables = Tables(segments, shape.heads, origin)
        sizes = tables.form
        if recorded:
            sizes = sizes.recorded(max(segment.cache.data.shape[2] for segment in segments))
        more = [0] * (sizes.rows - count)
        ids = [token for segment in segments for token in self._known(segment.tokens)]
        places = [position for segment in segments for position in segment.positions.tolist()]
        numbers = to_device([*ids, *more, *places, *more, *tables.numbers(sizes)], self.device)
        at = 0
        for segment in segments:  # tokens of draft passes that nobody has waited for
            if self._stays(segment.tokens):
                numbers[at : at + len(segment.tokens)] = segment.tokens
            at += len(segment.tokens)
        form = (sizes, origin.dtype) if recorded else None
        return CudaBatch.of(numbers, sizes, segments, origin, form)

    def layers(
        self,
        body: Body,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        batch: CudaBatch,
        keep: bool = True,
        taps: Taps | None = None,
        beside: Float[Tensor, "n D"] | None = None,
    ) -> Float[Tensor, "L H n d"]:
        """See :meth:`Backend.layers`. All segments' rows go through every kernel together.

        Raises:
            ValueError: states or angles are not of all of the batch's rows, those that fill it up included.
        """
        if not len(states) == len(cos) == len(sin) == len(batch.tokens):
            raise ValueError(f"{len(states)} states and {len(cos)} angles are of {len(batch.tokens)} rows")
        shape, ops, linear = body.shape, self.ops, self._products.parts
        whole = shape.active == torch.int8
        active = torch.float32 if whole else shape.weights
        kept: list[Tensor] = []
        if not whole and beside is None and self._fuses(body, batch):
            squares = ops.squares(states)
            for number, layer in enumerate(body.weights):
                if taps is not None:
                    taps.fill(number, states)
                turned = ops.turn_product(batch.plan, states, squares, layer, cos, sin, number, shape)
                kept = [*kept, turned] if keep else [turned]
                mixes = ops.attend(batch.plan, turned, number, shape.scale, layer.window).flatten(1)
                ops.add_product(states, squares, mixes.to(active), _packed(layer.out).data, layer.out_bias)
                inner = (layer.mlp_norm, shape.eps, _packed(layer.gate_up).data, layer.gate_up_bias)
                gated = ops.gate_product(states, squares, *inner)
                ops.add_product(states, squares, gated, _packed(layer.down).data, layer.down_bias)
            if taps is not None:
                taps.fill(len(body.weights), states)
            return torch.stack(kept).transpose(1, 2)
        more = None
        for number, layer in enumerate(body.weights):
            if layer.norm is None:
                normed = states.to(active)  # of a single layer: nothing is to be added yet
            else:
                normed = ops.norm(states, layer.norm, shape.eps, active, more)
            if taps is not None:
                taps.fill(number, states)
            mixed = linear(normed, _packed(layer.qkv), layer.qkv_bias, whole)
            if layer.beside is not None and layer.beside_norm is not None and beside is not None:
                normed = ops.norm(beside, layer.beside_norm, shape.eps, active)
                mixed = (summed(mixed) + summed(linear(normed, _packed(layer.beside), None, whole)))[None]
            norms = (shape.eps, layer.query_norm, layer.key_norm)
            query = ops.append(batch.plan, mixed, cos, sin, number, shape.heads, *norms)
            kept = [*kept, query] if keep else [query]
            mixes = ops.attend(batch.plan, query, number, shape.scale, layer.window).flatten(1)
            more = linear(mixes, _packed(layer.out), layer.out_bias, whole)
            normed = ops.norm(states, layer.mlp_norm, shape.eps, active, more)
            both = linear(normed, _packed(layer.gate_up), layer.gate_up_bias, whole)
            more = linear(ops.gated(both, active), _packed(layer.down), layer.down_bias, whole)
        if more is not None:
            states += summed(more)
        if taps is not None:
            taps.fill(len(body.weights), states)
        return torch.stack(kept).transpose(1, 2)

    def _fuses(self, body: Body, batch: CudaBatch) -> bool:
        """Whether a pass goes by the kernels that take a layer in few launches: of few rows, over float keys,
        with dense weights that the library does not multiply with."""
        if self._products.library or batch.plan.whole or not self.ops.fuses(body.shape, len(batch.tokens)):
            return False
        dense = body.shape.weights
        return all(
            layer.norm is not None and all(_packed(weight).is_dense(dense) for weight in layer.packed())
            for layer in body.weights
        )

    def replays(self) -> Graphs | None:
        """See :meth:`Backend.replays`."""
        return Graphs(self.device) if self.graphs else None

    def attend(
        self,
        query: Float[Tensor, "H n d"],
        layer: int,
        cache: KVCache,
        parents: Sequence[int] | None,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
        notes: dict[Any, Any] | None = None,
    ) -> Float[Tensor, "n H d"]:
        """See :meth:`Backend.attend`. Other types of keys are left to torch."""
        if cache.data.dtype not in TYPES:
            torchs = TorchBackend(self.device)
            return torchs.attend(query, layer, cache, parents, scale, window, softcap, sinks, notes)
        notes = {} if notes is None else notes
        plan: Plan | None = notes.get("plan")
        if plan is None:
            numbers = torch.arange(query.shape[1])
            segments = [Segment(numbers, numbers, cache, parents)]
            plan = notes["plan"] = plan_of(segments, len(query), self.device)
        rows = query.transpose(0, 1).to(torch.float32 if plan.whole else cache.data.dtype).contiguous()
        return self.ops.attend(plan, rows, layer, scale, window if cache.ordered else 0, softcap, sinks)

    def linear(
        self,
        states: Float[Tensor, "*m K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "*m N"]:
        """See :meth:`Backend.linear`."""
        rows = states.reshape(-1, states.shape[-1])
        made = self._products.linear(rows, _packed(weight), bias, active == torch.int8)
        return made.view(*states.shape[:-1], -1)

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """See :meth:`Backend.norm`."""
        return self.ops.norm(states.float().contiguous(), weight, eps, dtype)

    def _stays(self, tokens: Tensor) -> bool:
        """Whether tokens are where only the device looks."""
        return not self.walks and tokens.device.type == self.kind

    def _known(self, tokens: Tensor) -> list[int]:
        """Tokens as the host knows them; 0 for those that it does not."""
        return [0] * len(tokens) if self._stays(tokens) else tokens.tolist()

    def ranker(self, params: SamplingParams, rules: TextRules = NO_RULES) -> DeviceRanker | None:
        """See :meth:`Backend.ranker`: all of a ranking comes back at once. Adjustments are left to torch."""
        return None if params.adjusts else DeviceRanker(params, self._ranking, self.device, self.fetch)

    @property
    def _ranking(self) -> Graphs | None:
        """What rankings of all generations and models are recorded with; what differs is given to them."""
        if self.graphs and self._rankings is None:
            self._rankings = Graphs(self.device, RANKINGS)
        return self._rankings if self.graphs else None

    def fetch(self, values: Tensor) -> list[Any]:
        """Numbers from the device: the one place at which a step waits for it."""
        return values.tolist()


def _packed(weight: Packed) -> CudaPacked:
    """A weight of this backend.

    Raises:
        ValueError: another backend packed it.
    """
    if not isinstance(weight, CudaPacked):
        raise ValueError("a weight was packed by another backend")
    return weight
