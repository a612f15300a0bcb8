"""A pass through a decoder's layers in plain torch, the reference for the backends' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.attention import (
    AttentionContext,
    Masks,
    attention_bias,
    capped,
    rotated,
)
from tokenswift.kernels.batch import Body, LayerPass
from tokenswift.kernels.mixture import mixed_outputs, routes_of
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.recurrence import Trail, recurrent_outputs
from tokenswift.kernels.weights import (
    ExpertWeights,
    LayerWeights,
    MlpWeights,
    RecurrentWeights,
    Shape,
    active_type,
)
from tokenswift.kv.passes import Segment


class ReferenceLayers:
    """Runs layers with torch's operations; backends replace what they have kernels for."""

    on_host: bool  # as Backend says

    def layers(self, body: Body, layer_pass: LayerPass) -> list[Float[Tensor, "L H m d"]]:
        """Run a pass through all layers. Its states change in place; keys and values go to the
        scratch rows of each cache.

        Returns:
            For each segment the rotated queries of its m rows, (L, H, m, d), or (1, H, m, d)
            without `LayerPass.keep_queries`.
        Raises:
            ValueError: a segment does not fit its cache, or a parent is no earlier row.
        """
        shape = body.shape
        states = layer_pass.states
        features = layer_pass.features
        segments = [
            _SegmentPass(segment, rows)
            for segment, rows in zip(
                layer_pass.batch.segments, layer_pass.batch.rows(), strict=True
            )
        ]
        attending = 0  # layers so far that attend
        for number, layer in enumerate(body.weights):
            if shape.parallel:
                states -= states.mean(-1, keepdim=True)
            if features is not None:
                features.fill(number, states)
            normed = self._normed(states, layer.norm, shape, shape.active)
            qkv = self._qkv(normed, layer, shape, layer_pass)
            if layer.recurrent is not None:
                gates = self._recurrent_gates(states, layer, layer.recurrent, shape)
                mixed = _recurrent_rows(
                    qkv, gates, layer.recurrent, shape, number - attending, segments
                )
            else:
                heads = self._heads(qkv, layer, shape).rotated(layer.rope, layer_pass)
                mixed = self._attend_segments(heads, attending, layer, shape, segments)
                attending += 1
                if layer.gate is not None:
                    mixed = mixed * self.linear(normed, layer.gate).sigmoid()
            output = self.linear(mixed.to(shape.active), layer.out, layer.out_bias)
            states += self._normed(output, layer.out_norm, shape) * shape.residual
            if layer.experts is not None:
                output = self._experts(states, layer, layer.experts, shape)
            else:
                if not shape.parallel:
                    normed = self._normed(states, layer.mlp_norm, shape, shape.active)
                output = self._mlp(normed, layer.mlp(), shape)
            states += self._normed(output, layer.down_norm, shape) * shape.residual
        if shape.parallel:
            states -= states.mean(-1, keepdim=True)
        if features is not None:
            features.fill(len(body.weights), states)
        first = 0 if layer_pass.keep_queries else -1
        return [torch.stack(each.queries[first:]) for each in segments]

    def _normed(
        self,
        states: Float[Tensor, "*m D"],
        weight: Tensor | None,
        shape: Shape,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "*m D"]:
        """The norm of states, or without a weight the states themselves."""
        return states.to(dtype) if weight is None else self.norm(states, weight, shape.eps, dtype)

    def _qkv(
        self, normed: Float[Tensor, "n D"], layer: LayerWeights, shape: Shape, layer_pass: LayerPass
    ) -> Float[Tensor, "n N"]:
        """Queries, keys and values, with what a second input adds to them."""
        qkv = self.linear(normed, layer.qkv, layer.qkv_bias)
        second = layer_pass.second_input
        if layer.second_qkv is None or layer.second_norm is None or second is None:
            return qkv
        second = self.norm(second, layer.second_norm, shape.eps, shape.active)
        return qkv + self.linear(second, layer.second_qkv)

    def _recurrent_gates(
        self,
        states: Float[Tensor, "n D"],
        layer: LayerWeights,
        weights: RecurrentWeights,
        shape: Shape,
    ) -> Float[Tensor, "n gates"] | None:
        """Strengths and decays of the delta rule before their activations, in float32."""
        if weights.gates is None:
            return None
        return self.linear(self._normed(states, layer.norm, shape), weights.gates)

    def _heads(self, qkv: Float[Tensor, "n N"], layer: LayerWeights, shape: Shape) -> _Heads:
        """Queries, keys and values by head; queries and keys normed, over each head or over all
        heads together."""
        sizes = [shape.heads * shape.width, shape.kv_heads * shape.width]
        query, key, value = qkv.split([*sizes, sizes[1]], -1)

        def by_head(part: Tensor, norm: Tensor | None) -> Tensor:
            if norm is not None:
                part = self._normed(part.unflatten(-1, (-1, len(norm))), norm, shape).flatten(1)
            return part.unflatten(-1, (-1, shape.width)).transpose(0, 1)

        return _Heads(
            query=by_head(query, layer.query_norm),
            key=by_head(key, layer.key_norm),
            value=by_head(value, None),
        )

    def _attend_segments(
        self,
        heads: _Heads,
        number: int,
        layer: LayerWeights,
        shape: Shape,
        segments: Sequence[_SegmentPass],
    ) -> Float[Tensor, "n N"]:
        """Write the keys and values of all segments; attention of their rows, one below the
        other."""
        query = heads.query.to(shape.queries)
        mixed: list[Tensor] = []
        for each in segments:
            segment = each.segment
            entries = segment.cache.of_layer(number)
            scratch = slice(entries.length, entries.length + len(segment.tokens))
            entries.keys[:, scratch] = heads.key[:, each.rows].to(shape.keys)
            entries.values[:, scratch] = heads.value[:, each.rows].to(shape.keys)
            each.queries.append(query[:, each.rows])
            context = AttentionContext(
                layer=number,
                cache=segment.cache,
                parents=segment.parents,
                scale=shape.scale,
                window=layer.window if entries.ordered else 0,
                softcap=shape.cap or None,
                sinks=layer.sinks,
                masks=each.masks,
            )
            mixed.append(self.attend(each.queries[-1], context))
        return torch.cat(mixed).flatten(1)

    def _mlp(
        self, normed: Float[Tensor, "n D"], weights: MlpWeights, shape: Shape
    ) -> Float[Tensor, "n D"]:
        gated = self._gated(self.linear(normed, weights.gate_up, weights.gate_up_bias), shape)
        return self.linear(gated, weights.down, weights.down_bias)

    def _gated(self, gate_up: Float[Tensor, "n N"], shape: Shape) -> Float[Tensor, "n inner"]:
        gate, up = gate_up.chunk(2, dim=-1)
        if shape.gate_limit:
            gate = gate.clamp(max=shape.gate_limit)
            up = up.clamp(-shape.gate_limit, shape.gate_limit) + 1
            return (gate * (gate * shape.gate_slope).sigmoid() * up).to(shape.active)
        gated = F.gelu(gate, approximate="tanh") if shape.gelu else F.silu(gate)
        return (gated * up).to(shape.active)

    def _experts(
        self,
        states: Float[Tensor, "n D"],
        layer: LayerWeights,
        experts: ExpertWeights,
        shape: Shape,
    ) -> Float[Tensor, "n D"]:
        """What the experts of each row, and the shared one, make of the normed states."""
        mixture = shape.mixture
        if mixture is None:
            raise ValueError("a layer has experts, and the shape no mixture")
        normed = self._normed(states, layer.mlp_norm, shape)
        logits = self.linear(normed, experts.router, experts.router_bias)
        active = normed.to(shape.active)

        def mlp(inputs: Tensor, weights: MlpWeights) -> Tensor:
            return self._mlp(inputs, weights, shape)

        routes = routes_of(logits[:, : mixture.experts], mixture, experts.bias)
        total = mixed_outputs(active, routes, experts, mlp)
        if layer.gate_up is None:
            return total
        shared = self._mlp(active, layer.mlp(), shape)
        if mixture.shared_gate:
            shared = logits[:, mixture.experts :].sigmoid() * shared
        return total + shared

    def attend(
        self, query: Float[Tensor, "H n d"], context: AttentionContext
    ) -> Float[Tensor, "n H d"]:
        """Attention of one segment's rows in one layer."""
        heads, rows, width = query.shape
        entries = context.cache.of_layer(context.layer)
        end = entries.length + rows
        key = entries.keys[None, :, :end]
        value = entries.values[None, :, :end]
        kind = key.dtype
        if self.on_host and kind != torch.float64:
            kind = active_type(kind)
            key = key.float()
            value = value.float()
        groups = heads // key.shape[1]
        packed = query.to(kind).to(key.dtype).reshape(1, -1, groups * rows, width)
        bias = _bias(entries.length, rows, groups, packed, context)
        scale = context.scale
        if context.softcap is None and context.sinks is None:
            out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scale)
        else:
            out = capped(packed, key, value, bias, scale, context.softcap, context.sinks)
        return out.reshape(heads, rows, width).transpose(0, 1).to(kind)

    def linear(
        self,
        states: Float[Tensor, "*m K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "*m N"]:
        """``states @ weight.T + bias`` in float32; with ``active`` int8 and a weight stored
        quantized, states are quantized too and integers are multiplied."""
        active = active_type(weight.dtype)
        out = F.linear(states.to(active), weight.unpack().to(active)).float()
        return out if bias is None else out + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """RMS norm, computed in float32; the result is ``dtype``."""
        states = states.float()
        inverse = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
        return (states * inverse * weight).to(dtype)


@dataclass(slots=True)
class _SegmentPass:
    """A segment on its way through the layers: its rows of the batch, its queries of the layers so
    far, masks that layers share, and the log of recurrent layers."""

    segment: Segment
    rows: slice
    queries: list[Tensor] = field(default_factory=list)
    masks: Masks = field(default_factory=dict)
    log: Tensor | None = None


@dataclass(slots=True, frozen=True)
class _Heads:
    """Queries, keys and values by head."""

    query: Float[Tensor, "H n d"]
    key: Float[Tensor, "K n d"]
    value: Float[Tensor, "K n d"]

    def rotated(self, angle_set: int, layer_pass: LayerPass) -> _Heads:
        """With queries and keys rotated by a set of a pass's angles, by none below 0; and the
        queries scaled."""
        query = self.query
        key = self.key
        if angle_set >= 0:
            cos = _angles(layer_pass.cos, angle_set)
            sin = _angles(layer_pass.sin, angle_set)
            query = rotated(query, cos, sin)
            key = rotated(key, cos, sin)
        if layer_pass.query_scale is not None:
            query = query * layer_pass.query_scale[:, None]
        return _Heads(query, key, self.value)


def _recurrent_rows(
    projected: Float[Tensor, "n N"],
    gates: Float[Tensor, "n gates"] | None,
    weights: RecurrentWeights,
    shape: Shape,
    number: int,
    segments: Sequence[_SegmentPass],
) -> Float[Tensor, "n M"]:
    """What a recurrent layer makes of the rows of all segments.

    Args:
        number: of the layer among the recurrent ones.
    """
    outputs: list[Tensor] = []
    for each in segments:
        segment = each.segment
        states = segment.cache.states
        if states is None or shape.recurrence is None:
            raise ValueError("a layer is recurrent, and the cache has no states")
        count = len(segment.tokens)
        if not number:
            each.log = states.open(count, segment.parents)
        if each.log is None:
            log = states.now.new_empty(count, shape.recurrence.logged)
        else:
            log = each.log[number, :count]
        trail = Trail(states.now[number], states.next[number], log, segment.parents)
        part = None if gates is None else gates[each.rows]
        outputs.append(
            recurrent_outputs(
                projected[each.rows], part, weights, shape.recurrence, trail, shape.eps
            )
        )
    return torch.cat(outputs)


def _angles(values: Float[Tensor, "*sets n half"], angle_set: int) -> Float[Tensor, "n half"]:
    return values.view(-1, *values.shape[-2:])[angle_set]


def _bias(
    before: int, rows: int, groups: int, packed: Tensor, context: AttentionContext
) -> Float[Tensor, "m L"] | None:
    """The attention bias for the packed queries of all heads of a group; None: a row sees all."""
    window = context.window if context.window < before + rows else 0
    if rows == 1 and not window:
        return None
    masks: Masks = {} if context.masks is None else context.masks
    key = (before, window, groups)
    if key not in masks:
        bias = attention_bias(before, rows, context.parents, window, packed)
        masks[key] = bias.repeat(groups, 1)
    return masks[key]
