"""Segments and passes that the tests of the CUDA backend share, and its kernels in torch, row by
row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_of
from torch.nn.functional import silu

from tokenswift.kernels.attention import AttentionContext, rotated
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.ops import Addend
from tokenswift.kernels.cuda.plan import CudaBatch, RowEntry, Tables, block_rows_of
from tokenswift.kernels.cuda.products import Product
from tokenswift.kernels.weights import LayerWeights, Shape
from tokenswift.kv.cache import FullCache
from tokenswift.kv.entries import Entries
from tokenswift.kv.passes import Segment

CPU = torch.device("cpu")
TORCH = Backend()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tree(rows: int, reach: int) -> list[int]:
    """Parents; a small reach makes it deep, a large one wide."""
    generator = torch.Generator().manual_seed(rows)
    parents = [-1]
    for row in range(1, rows):
        parent = torch.randint(max(0, row - reach), row, (1,), generator=generator)
        parents.append(int(parent))
    return parents


def segment(
    before: int,
    rows: int,
    parents: list[int] | None,
    kv_heads: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 2,
    layers: int = 1,
    ordered: bool = True,
) -> Segment:
    """Rows over a cache of random keys and values, their own among them."""
    cache = FullCache(Entries(layers, kv_heads, width, before + rows, dtype, CPU))
    cache.data.copy_(random(*cache.data.shape, seed=seed))
    cache.commit(tuple(range(before)))
    cache.ordered = ordered
    numbers = torch.arange(rows)
    return Segment(numbers, numbers, cache, parents)


def shape_of(heads: int, kv_heads: int, width: int, dtype: torch.dtype = torch.float32) -> Shape:
    return Shape(
        layers=1,
        hidden=64,
        inner=96,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        weights=dtype,
        keys=dtype,
        active=dtype,
        eps=1e-5,
        scale=width**-0.5,
    )


def batch_of(segments: list[Segment], shape: Shape, device: torch.device = CPU) -> CudaBatch:
    """A pass that is not recorded, its tables as small as they are."""
    origin = torch.empty(64, dtype=torch.uint8, device=device).view(shape.keys)
    tables = Tables(segments, block_rows_of(shape), origin, is_prompt=False)
    numbers = torch.tensor(tables.numbers(tables.sizes), device=device)
    return CudaBatch.from_numbers(numbers, tables.sizes, segments, origin)


def entry_of(batch: CudaBatch, row: int) -> RowEntry:
    """What the kernels read of a row."""
    return RowEntry(*batch.row_table[row].tolist())


def product(states: Tensor, weight: Tensor) -> Tensor:
    """In place of the library's."""
    return (states.double() @ weight.double().T).float()


class TorchOps:
    """What `launch.Kernels` computes, each row by itself."""

    def norm(
        self,
        states: Tensor,
        weight: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        addend: Addend | None = None,
        centred: bool = False,
    ) -> Tensor:
        if addend is not None:
            values = addend.values
            if addend.norm is not None:
                values = self.norm(values, addend.norm, eps, torch.float32)
            states += addend.factor * values
        if centred:
            states -= torch.cat([row.mean(-1, keepdim=True) for row in states.split(1)])
        if weight is None:
            return states.to(dtype)
        return torch.cat([TORCH.norm(row, weight, eps, dtype) for row in states.split(1)])

    def gated(self, gate_up: Tensor, dtype: torch.dtype, gelu: bool = False) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        rows = [gelu_of(row, approximate="tanh") if gelu else silu(row) for row in gate.split(1)]
        return torch.cat(rows).mul(up).to(dtype)

    def append(
        self,
        batch: CudaBatch,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        number: int,
        layer: LayerWeights,
        shape: Shape,
    ) -> Tensor:
        heads = qkv.view(len(qkv), -1, shape.width).transpose(0, 1)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
        if not shape.norm_all_heads:
            query = self._head_norm(query, layer.query_norm, shape.eps)
            key = self._head_norm(key, layer.key_norm, shape.eps)
        if layer.rope >= 0:
            query = rotated(query, cos, sin)
            key = rotated(key, cos, sin)
        for segment, rows in zip(batch.segments, batch.rows(), strict=True):
            cache = segment.cache
            slots = range(cache.length, cache.length + rows.stop - rows.start)
            entries = [entry_of(batch, row) for row in range(rows.start, rows.stop)]
            assert [entry.slot for entry in entries] == list(slots)
            scratch = slice(slots.start, slots.stop)
            cache.data[2 * number, :, scratch] = key[:, rows].to(shape.keys)
            cache.data[2 * number + 1, :, scratch] = value[:, rows].to(shape.keys)
        return query.transpose(0, 1).to(shape.keys).contiguous()

    def _head_norm(self, heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if weight is None:
            return heads
        return self.norm(heads.flatten(0, 1), weight, eps, torch.float32).view_as(heads)

    def attend(
        self, batch: CudaBatch, query: Tensor, layer: int, shape: Shape, window: int
    ) -> Tensor:
        out = torch.zeros_like(query)
        for segment, rows in zip(batch.segments, batch.rows(), strict=True):
            data = segment.cache.data
            for row in range(rows.start, rows.stop):
                entry = entry_of(batch, row)
                before = entry.before
                path = batch.paths[row, : entry.position - before + 1]
                windowed = window and entry.ordered
                oldest = max(0, entry.position - window + 1) if windowed else 0
                slots = torch.cat([torch.arange(before), before + path])[oldest:]
                keys = data[2 * layer, :, slots].float()
                values = data[2 * layer + 1, :, slots].float()
                grouped = query[row].float().view(shape.kv_heads, -1, shape.width)
                scores = grouped @ keys.mT * shape.scale
                if shape.cap:
                    scores = shape.cap * (scores / shape.cap).tanh()
                out[row] = (scores.softmax(-1) @ values).flatten(0, 1).to(out.dtype)
        return out


def backend_on_cpu(library: Product = product) -> CudaBackend:
    """The backend on a CPU, the kernels' work by torch."""
    backend = CudaBackend("cpu", TorchOps(), library)
    backend.equal_bits = True
    return backend


def by_torch(segment: Segment, query: Tensor, shape: Shape, window: int = 0) -> Tensor:
    """Attention of one segment's rows (n, H, d) by the torch backend."""
    context = AttentionContext(
        layer=0,
        cache=segment.cache,
        parents=segment.parents,
        scale=shape.scale,
        window=window if segment.cache.ordered else 0,
        softcap=shape.cap or None,
    )
    return TORCH.attend(query.transpose(0, 1), context)
