"""The kernels in plain torch: what `native` computes, by the same specification (docs/exactness.md).

It runs where nothing can be compiled. The order of chunks and merges is the specification's; inside a chunk
and inside a product torch's own kernels add up, and a row's bits may depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenswift.backends.cpu.weights import LayerWeights, Packed, Shape
from tokenswift.config import SamplingParams
from tokenswift.interfaces import KVCache

CHUNK = 256  # keys of an attention chunk; CHUNK of cpu_tile.h


@dataclass(slots=True)
class Body:
    """A decoder's layers."""

    shape: Shape
    weights: list[LayerWeights]


class TorchKernels:
    """The methods of `native.NativeKernels` in torch, on any device."""

    name = "torch"
    panels = False

    def ranker(self, params: SamplingParams) -> None:
        """None: `sampling.choice.Sampler` does it in torch."""

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """The layers in the form that :meth:`layers` takes."""
        return Body(shape, weights)

    def layers(
        self,
        body: Body,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        cache: KVCache,
        parents: Sequence[int] | None,
        keep: bool = True,
    ) -> Float[Tensor, "L H n d"]:
        """Run a pass through all layers; see `native.NativeKernels.layers`."""
        shape, count, start = body.shape, len(states), cache.length
        queries = torch.empty(
            shape.layers, shape.heads, count, shape.width, dtype=shape.active, device=states.device
        )
        for number, layer in enumerate(body.weights):
            normed = self.norm(states, layer.norm, shape.eps, shape.active)
            qkv = self.linear(normed, layer.qkv, layer.qkv_bias)
            heads = qkv.view(count, -1, shape.width).transpose(0, 1)
            query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
            if layer.query_norm is not None and layer.key_norm is not None:
                query = self.norm(query, layer.query_norm, shape.eps, torch.float32)
                key = self.norm(key, layer.key_norm, shape.eps, torch.float32)
            queries[number] = turned(query, cos, sin).to(shape.active)
            cache.data[2 * number, :, start : start + count] = turned(key, cos, sin).to(shape.dtype)
            cache.data[2 * number + 1, :, start : start + count] = value.to(shape.dtype)
            window = layer.window if cache.ordered else 0
            mixed = self.attend(queries[number], number, cache, parents, shape.scale, window)
            states += self.linear(mixed.reshape(count, -1), layer.out, layer.out_bias)
            normed = self.norm(states, layer.mlp_norm, shape.eps, shape.active)
            gate, up = self.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            states += self.linear((F.silu(gate) * up).to(shape.active), layer.down, layer.down_bias)
        return queries

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
    ) -> Float[Tensor, "n H d"]:
        """Attention of one layer; see `native.NativeKernels.attend`.

        Args:
            softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
            sinks: a score per head that takes part in the softmax and has no value (gpt-oss).
        """
        keys, values = cache.data[2 * layer], cache.data[2 * layer + 1]
        active = torch.bfloat16 if keys.dtype == torch.bfloat16 else torch.float32
        heads, count, width = query.shape
        query = query.to(active).float().view(keys.shape[0], -1, count, width)
        paths = row_paths(count, parents)
        depth = torch.tensor([len(path) - 1 for path in paths], device=query.device)
        total, top = torch.zeros_like(query), torch.full_like(query[..., :1], -torch.inf)
        whole = torch.zeros_like(top)
        for start in range(0, cache.length + max(map(len, paths)), CHUNK):
            places = torch.arange(start, start + CHUNK, device=query.device)
            here = cache.length + depth[:, None]
            seen = (places <= here) & ((places > here - window) if window else True)  # (n, keys)
            if parents is None or start + CHUNK <= cache.length:  # the keys stand at their positions
                end = min(start + CHUNK, cache.length + count)
                seen = seen[:, : end - start]
                key, value = (part[:, start:end].float() for part in (keys, values))
                scores = torch.einsum("kgnd,kjd->kgnj", query, key)
                mix = "kgnj,kjd->kgnd"
            else:  # gathered along each row's own path
                slots = _slots(paths, cache.length, start).to(query.device)
                key, value = (part[:, slots].float() for part in (keys, values))
                scores = torch.einsum("kgnd,knjd->kgnj", query, key)
                mix = "kgnj,knjd->kgnd"
            scores = scores * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            peak = scores.amax(-1, keepdim=True)
            weights = torch.where(seen, (scores - peak).exp(), 0.0)
            sums = weights.sum(-1, keepdim=True)
            total, top, whole = _merged(total, top, whole, torch.einsum(mix, weights, value), peak, sums)
        if sinks is not None:
            extra = sinks.float().view(keys.shape[0], -1, 1, 1).expand_as(top)
            total, top, whole = _merged(
                total, top, whole, torch.zeros_like(total), extra, torch.ones_like(top)
            )
        out = (total / whole).permute(2, 0, 1, 3).reshape(count, heads, width)
        return out.to(active)

    def linear(
        self, states: Float[Tensor, "*m K"], weight: Packed, bias: Tensor | None = None
    ) -> Float[Tensor, "*m N"]:
        """States times the weight's transpose, plus bias; float32."""
        data = weight.unpack()
        active = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        out = F.linear(states.to(active), data.to(active)).float()
        return out if bias is None else out + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """RMS norm of float32 states, as ``dtype``."""
        states = states.float()
        return (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight).to(dtype)


def turned(
    states: Float[Tensor, "h n d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"]
) -> Float[Tensor, "h n d"]:
    """Rotary embedding: pairs (j, j + d/2) turned by the angles of each row's position."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def row_paths(count: int, parents: Sequence[int] | None) -> list[list[int]]:
    """For each row of a pass, the rows on its path (itself last), which follow the committed keys."""
    if parents is None:
        return [list(range(row + 1)) for row in range(count)]
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def _slots(paths: list[list[int]], before: int, start: int) -> Tensor:
    """The cache entries at the positions of a chunk, by row (n, CHUNK); 0 where a row has none."""
    rows = []
    for path in paths:
        places = range(start, min(start + CHUNK, before + len(path)))
        row = [at if at < before else before + path[at - before] for at in places]
        rows.append(row + [0] * (CHUNK - len(row)))
    return torch.tensor(rows, dtype=torch.long)


def _merged(
    total: Tensor, top: Tensor, whole: Tensor, mixed: Tensor, peak: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted values, max and sum of two sets of keys together."""
    best = torch.maximum(top, peak)
    old, new = (torch.where(x == -torch.inf, 0.0, (x - best).exp()) for x in (top, peak))
    return total * old + mixed * new, best, whole * old + sums * new
