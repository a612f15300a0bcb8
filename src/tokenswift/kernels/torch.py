"""A pass in plain torch, on any device: the reference that compiled kernels are held against.

It runs where nothing can be compiled. Torch's own kernels add up in their own order, and a row's bits may
depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.base import Backend, Batch, Body, Taps
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv import KVCache
from tokenswift.tree import ancestor_mask


class TorchBackend(Backend):
    """Torch's own operations."""

    name = "torch"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.decodes = self.kind == "cpu"

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """See :meth:`Backend.body`."""
        return Body(shape, weights)

    def layers(
        self,
        body: Body,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
        batch: Batch,
        keep: bool = True,
        taps: Taps | None = None,
        beside: Float[Tensor, "n D"] | None = None,
    ) -> list[Float[Tensor, "L H m d"]]:
        """See :meth:`Backend.layers`. Products run over all rows, attention over each segment's."""
        shape, count, places = body.shape, len(states), batch.rows()
        kept: list[list[Tensor]] = [[] for _ in places]
        notes: list[dict[Any, Any]] = [{} for _ in places]
        active = shape.active
        for number, layer in enumerate(body.weights):
            if shape.parallel:
                states -= states.mean(-1, keepdim=True)
            if taps is not None:
                taps.fill(number, states)
            normed = self._normed(states, layer.norm, shape, active)
            qkv = self.linear(normed, layer.qkv, layer.qkv_bias)
            if layer.beside is not None and layer.beside_norm is not None and beside is not None:
                normed = self.norm(beside, layer.beside_norm, shape.eps, active)
                qkv += self.linear(normed, layer.beside)
            query, key, value = self._heads(qkv, layer, shape, cos, sin)
            mixed: list[Tensor] = []
            for segment, rows, own, noted in zip(batch.segments, places, kept, notes, strict=True):
                cache = segment.cache
                data, place, before, ordered = cache.of_layer(number)
                into = slice(before, before + len(segment.tokens))
                data[2 * place, :, into] = key[:, rows].to(shape.keys)
                data[2 * place + 1, :, into] = value[:, rows].to(shape.keys)
                window = layer.window if ordered else 0
                own.append(query[:, rows])
                how = (cache, segment.parents, shape.scale, window, shape.cap or None)
                mixed.append(self.attend(own[-1], number, *how, notes=noted))
            mixes = torch.cat(mixed).reshape(count, -1).to(active)
            made = self.linear(mixes, layer.out, layer.out_bias)
            states += self._normed(made, layer.out_norm, shape) * shape.residual
            if not shape.parallel:
                normed = self._normed(states, layer.mlp_norm, shape, active)
            gate, up = self.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            gated = F.gelu(gate, approximate="tanh") if shape.gelu else F.silu(gate)
            made = self.linear((gated * up).to(active), layer.down, layer.down_bias)
            states += self._normed(made, layer.down_norm, shape) * shape.residual
        if shape.parallel:
            states -= states.mean(-1, keepdim=True)
        if taps is not None:
            taps.fill(len(body.weights), states)
        return [torch.stack(own if keep else own[-1:]) for own in kept]

    def _normed(
        self,
        states: Float[Tensor, "*m D"],
        weight: Tensor | None,
        shape: Shape,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "*m D"]:
        """The norm of states, or where there is none the states."""
        return states.to(dtype) if weight is None else self.norm(states, weight, shape.eps, dtype)

    def _heads(
        self,
        qkv: Float[Tensor, "n N"],
        layer: LayerWeights,
        shape: Shape,
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
    ) -> list[Float[Tensor, "h n d"]]:
        """Queries and keys, with their norms and turned, and values."""
        width, made = shape.width, list[Tensor]()
        own = [shape.heads * width, *[shape.kv_heads * width] * 2]
        for part, norm in zip(qkv.split(own, -1), (layer.query_norm, layer.key_norm, None), strict=True):
            if norm is not None:  # over all heads together, or each by itself
                part = self._normed(part.unflatten(-1, (-1, len(norm))), norm, shape).flatten(1)
            made.append(part.unflatten(-1, (-1, width)).transpose(0, 1))
        query, key, value = made
        if layer.rope >= 0:
            angles = [part.view(-1, *part.shape[-2:])[layer.rope] for part in (cos, sin)]
            query, key = turned(query, *angles), turned(key, *angles)
        return [query.to(shape.queries), key, value]

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
        """See :meth:`Backend.attend`. The queries of a group are packed as rows of their KV head, so that the
        cache is read once and never repeated. On a CPU sums are float32."""
        heads, rows, width = query.shape
        data, place, before, _ = cache.of_layer(layer)
        end = before + rows
        key, value = (data[2 * place + part, None, :, :end] for part in (0, 1))
        kind = key.dtype
        if self.on_host and kind != torch.float64:
            kind, key, value = active_type(kind), key.float(), value.float()
        groups = heads // key.shape[1]
        packed = query.to(kind).to(key.dtype).reshape(1, -1, groups * rows, width)
        window, bias = window if window < end else 0, None
        if rows > 1 or window:
            notes = {} if notes is None else notes
            key_of = (before, window, groups)
            if key_of not in notes:
                notes[key_of] = _bias(before, rows, parents, window, packed).repeat(groups, 1)
            bias = notes[key_of]
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scale)
        else:
            out = capped(packed, key, value, bias, scale, softcap, sinks)
        return out.reshape(heads, rows, width).transpose(0, 1).to(kind)

    def linear(
        self,
        states: Float[Tensor, "*m K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "*m N"]:
        """See :meth:`Backend.linear`; of floats alone."""
        active = active_type(weight.dtype)
        out = F.linear(states.to(active), weight.unpack().to(active)).float()
        return out if bias is None else out + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """See :meth:`Backend.norm`."""
        states = states.float()
        return (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight).to(dtype)


def capped(
    query: Float[Tensor, "1 K m d"],
    key: Float[Tensor, "1 K L d"],
    value: Float[Tensor, "1 K L d"],
    bias: Float[Tensor, "m L"] | None,
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "1 K m d"]:
    """Attention with a cap of the scores or with sinks, which torch's own lacks; in float32 at least."""
    kind = torch.promote_types(key.dtype, torch.float32)
    scores = query.to(kind) @ key.to(kind).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if sinks is not None:
        kv_heads, rows = query.shape[1:3]
        own = sinks.to(scores.dtype).view(kv_heads, -1, 1).expand(-1, -1, rows * kv_heads // len(sinks))
        scores = torch.cat([scores, own.reshape(1, kv_heads, rows, 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.to(kind)


def _bias(
    before: int, rows: int, parents: Sequence[int] | None, window: int, like: Tensor
) -> Float[Tensor, "n L"]:
    """What is added to scores: -inf where a row does not see a key."""
    device = like.device
    if parents is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=device).tril_()
    else:
        mask = ancestor_mask(parents, device)
    visible = torch.cat([mask.new_ones(rows, before), mask], dim=1)
    if window:
        paths = row_paths(rows, parents)
        here = torch.tensor([before + len(path) - 1 for path in paths], device=device)
        places = torch.cat([torch.arange(before, device=device), here])
        visible &= places[None, :] > here[:, None] - window
    bias = torch.zeros(visible.shape, dtype=like.dtype, device=device)
    return bias.masked_fill_(~visible, -torch.inf)


def turned(
    states: Float[Tensor, "*h n d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"]
) -> Float[Tensor, "*h n d"]:
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
