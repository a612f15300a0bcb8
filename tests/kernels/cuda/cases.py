"""Texts and passes that the tests of the CUDA backend share, and its kernels in torch, row by
row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_of
from torch.nn.functional import silu

from tokenswift.kernels.attention import turned
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.plan import CudaBatch, Tables, queries_of
from tokenswift.kernels.cuda.products import Product
from tokenswift.kernels.weights import LayerWeights, Shape
from tokenswift.kv.cache import Entries, FullCache
from tokenswift.kv.passes import Segment

CPU = torch.device("cpu")
TORCH = Backend()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tree(rows: int, reach: int) -> list[int]:
    """Parents; a small reach makes it deep, a large one wide."""
    made = torch.Generator().manual_seed(rows)
    return [
        -1,
        *(int(torch.randint(max(0, i - reach), i, (1,), generator=made)) for i in range(1, rows)),
    ]


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
    types = (dtype, dtype, dtype)
    return Shape(1, 64, 96, heads, kv_heads, width, *types, 1e-5, width**-0.5)


def batch_of(segments: list[Segment], shape: Shape, device: torch.device = CPU) -> CudaBatch:
    """A pass that is not recorded, its tables as small as they are."""
    origin = torch.empty(64, dtype=torch.uint8, device=device).view(shape.keys)
    step = queries_of(shape.width, shape.keys.itemsize) * shape.kv_heads // shape.heads
    tables = Tables(segments, max(1, step), origin, False)
    numbers = torch.tensor(tables.numbers(tables.form), device=device)
    return CudaBatch.over(numbers, tables.form, segments, origin)


def product(states: Tensor, weight: Tensor) -> Tensor:
    """In place of the library's."""
    return (states.double() @ weight.double().T).float()


class Rows:
    """What `launch.Kernels` computes, each row by itself."""

    def norm(
        self,
        states: Tensor,
        weight: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        more: Tensor | None = None,
        behind: Tensor | None = None,
        factor: float = 1.0,
        centred: bool = False,
    ) -> Tensor:
        if more is not None:
            states += factor * (
                more if behind is None else self.norm(more, behind, eps, torch.float32)
            )
        if centred:
            states -= torch.cat([row.mean(-1, keepdim=True) for row in states.split(1)])
        if weight is None:
            return states.to(dtype)
        return torch.cat([TORCH.norm(row, weight, eps, dtype) for row in states.split(1)])

    def gated(self, both: Tensor, dtype: torch.dtype, gelu: bool = False) -> Tensor:
        gate, up = both.chunk(2, dim=1)
        made = [gelu_of(row, approximate="tanh") if gelu else silu(row) for row in gate.split(1)]
        return torch.cat(made).mul(up).to(dtype)

    def append(
        self,
        batch: CudaBatch,
        mixed: Tensor,
        cos: Tensor,
        sin: Tensor,
        number: int,
        layer: LayerWeights,
        shape: Shape,
    ) -> Tensor:
        heads = mixed.view(len(mixed), -1, shape.width).transpose(0, 1)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
        if layer.query_norm is not None and layer.key_norm is not None and not shape.whole_norms:
            query = self.norm(
                query.flatten(0, 1), layer.query_norm, shape.eps, torch.float32
            ).view_as(query)
            key = self.norm(key.flatten(0, 1), layer.key_norm, shape.eps, torch.float32).view_as(
                key
            )
        if layer.rope >= 0:
            query, key = turned(query, cos, sin), turned(key, cos, sin)
        for segment, rows in zip(batch.segments, batch.rows(), strict=True):
            cache = segment.cache
            assert batch.rows_at[rows, 3].tolist() == [
                cache.length + row for row in range(rows.stop - rows.start)
            ]
            into = slice(cache.length, cache.length + rows.stop - rows.start)
            cache.data[2 * number, :, into] = key[:, rows].to(shape.keys)
            cache.data[2 * number + 1, :, into] = value[:, rows].to(shape.keys)
        return query.transpose(0, 1).to(shape.keys).contiguous()

    def attend(
        self, batch: CudaBatch, query: Tensor, layer: int, shape: Shape, window: int
    ) -> Tensor:
        made = torch.zeros_like(query)
        for segment, rows in zip(batch.segments, batch.rows(), strict=True):
            data = segment.cache.data
            for row in range(rows.start, rows.stop):
                _, _, before, _, here, ordered = batch.rows_at[row].tolist()
                path = batch.paths[row, : here - before + 1]
                oldest = max(0, here - window + 1) if window and ordered else 0
                slots = torch.cat([torch.arange(before), before + path])[oldest:]
                keys, values = (data[2 * layer + part, :, slots].float() for part in (0, 1))
                grouped = query[row].float().view(shape.kv_heads, -1, shape.width)
                scores = grouped @ keys.mT * shape.scale
                weights = (
                    shape.cap * (scores / shape.cap).tanh() if shape.cap else scores
                ).softmax(-1)
                made[row] = (weights @ values).flatten(0, 1).to(made.dtype)
        return made


def standing(library: Product = product) -> CudaBackend:
    """The backend on a CPU, the kernels' work by torch."""
    made = CudaBackend("cpu", Rows(), library)
    made.equal_bits = True
    return made


def by_torch(text: Segment, query: Tensor, shape: Shape, window: int = 0) -> Tensor:
    """Attention of one text's rows (n, H, d) by the torch backend."""
    window = window if text.cache.ordered else 0
    how: Any = (0, text.cache, text.parents, shape.scale, window, shape.cap or None)
    return TORCH.attend(query.transpose(0, 1), *how)
