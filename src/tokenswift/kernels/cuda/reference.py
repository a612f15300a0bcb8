"""What the Triton kernels compute, in torch: their tests' reference, and the path without a card.

Chunks, tiles and merges come in the kernels' order. Inside a tile and inside a product torch adds up, so that
a row's bits may depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor

from tokenswift.interfaces import Segment
from tokenswift.kernels.cuda import int_reference
from tokenswift.kernels.cuda.entries import width_of
from tokenswift.kernels.cuda.fused_reference import FusedReference, tree_sum
from tokenswift.kernels.cuda.plan import CHUNK, SPAN, TILE, Plan
from tokenswift.kernels.cuda.weights import Planes
from tokenswift.kernels.torch import quantized, row_paths, turned

Sums = tuple[Tensor, Tensor, Tensor]  # weighted values (…, d), maximum and sum (…, 1) of some keys


class Reference(FusedReference):
    """Torch's operations in place of the kernels; `launch.Kernels` has the same methods."""

    def attend(
        self,
        plan: Plan,
        query: Float[Tensor, "n H d"],
        layer: int,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "n H d"]:
        """Attention of one layer, whose keys and values of the pass are in the caches.

        Args:
            window: newest keys that a row sees, itself included, where entries stand at their positions; 0:
                all.
            softcap: scores become ``softcap * tanh(score / softcap)``.
            sinks: a score per head that takes part in the softmax and has no value.
        Raises:
            ValueError: keys are int8, and there are caps or sinks.
        """
        if plan.whole:
            check_plain(softcap, sinks)
            return int_reference.attend(plan, query, layer, scale, window)
        ends = accumulate((len(segment.tokens) for segment in plan.segments), initial=0)
        made = [
            _attended(segment, query[start:end], layer, scale, window, softcap, sinks)
            for segment, (start, end) in zip(plan.segments, pairwise(ends), strict=True)
        ]
        more = len(query) - sum(map(len, made))
        return torch.cat([*made, query.new_zeros(more, *query.shape[1:])])

    def append(
        self,
        plan: Plan,
        mixed: Float[Tensor, "p n E"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        layer: int,
        heads: int,
        eps: float = 0.0,
        query_norm: Float[Tensor, " d"] | None = None,
        key_norm: Float[Tensor, " d"] | None = None,
    ) -> Float[Tensor, "n H d"]:
        """Norm and turn queries and keys; put keys and values behind the caches' own.

        Args:
            mixed: parts of sums that are by row queries, keys and values, float32.
        Returns:
            The queries, of the keys' type; float32 for int8.
        """
        data = plan.segments[0].cache.data
        kv_heads, width = data.shape[1], width_of(data)
        query, key, value = summed(mixed).unflatten(1, (-1, width)).split([heads, kv_heads, kv_heads], 1)
        if query_norm is not None and key_norm is not None:
            query = self.norm(query, query_norm, eps, torch.float32)
            key = self.norm(key, key_norm, eps, torch.float32)
        query, key = (turned(part.transpose(0, 1), cos, sin).transpose(0, 1) for part in (query, key))
        if plan.whole:
            int_reference.append(plan, layer, key, value)
            return query
        start = 0
        for segment in plan.segments:
            rows, at = slice(start, start + len(segment.tokens)), segment.cache.length
            into = slice(at, at + len(segment.tokens))
            segment.cache.data[2 * layer, :, into] = key[rows].transpose(0, 1).to(data.dtype)
            segment.cache.data[2 * layer + 1, :, into] = value[rows].transpose(0, 1).to(data.dtype)
            start = rows.stop
        return query.to(data.dtype)

    def move(self, data: Num[Tensor, "P K c e"], start: int, nodes: Sequence[int]) -> None:
        """Move entries ``start + nodes[i]`` to ``start + i``; nodes rise."""
        rows = torch.tensor(nodes, device=data.device) + start
        data[:, :, start : start + len(nodes)] = data.index_select(2, rows)

    def norm(
        self,
        states: Float[Tensor, "*m D"],
        weight: Float[Tensor, " D"],
        eps: float,
        dtype: torch.dtype,
        more: Float[Tensor, "p *m D"] | None = None,
    ) -> Float[Tensor, "*m D"]:
        """RMS norm of float32 states, to which the sum of the parts ``more`` is added first, in place."""
        if more is not None:
            states += summed(more)
        mean = tree_sum(states * states)[..., None] / states.shape[-1]
        return (states * torch.rsqrt(mean + eps) * weight).to(dtype)

    def gated(
        self, both: Float[Tensor, "p n I2"], dtype: torch.dtype, gelu: bool = False
    ) -> Float[Tensor, "n I"]:
        """``silu(gate) * up`` of gate, then up, float32 in parts of sums; or with GELU's tanh form."""
        gate, up = summed(both).chunk(2, dim=-1)
        return ((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up).to(dtype)

    def product(
        self,
        states: Float[Tensor, "n K"],
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, " N"] | None,
        fold: bool = True,
    ) -> Float[Tensor, "p n N"]:
        """Rows times a weight's transpose, both of one type, and a bias; float32, in parts whose sum it is:
        with ``fold`` one, otherwise as many as there happen to be."""
        return F.linear(states.float(), weight.float(), bias)[None]

    def low_product(
        self,
        states: Float[Tensor, "n K"],
        planes: Planes,
        bias: Float[Tensor, " N"] | None,
        whole: bool,
        fold: bool = True,
    ) -> Float[Tensor, "p n N"]:
        """Rows times a quantized weight, unpacked to the rows' type; or with ``whole`` of activations as
        integers of 8 bits; float32, in parts as of `product`."""
        values = planes.values(slice(None))
        if whole:
            return F.linear(quantized(states), values, bias)[None]
        return self.product(states, values.to(states.dtype), bias)


def summed(parts: Float[Tensor, "p *any d"]) -> Float[Tensor, "*any d"]:
    """Parts of sums, added in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def check_plain(softcap: float | None, sinks: Tensor | None) -> None:
    """Refuse caps and sinks, which attention over keys in int8 does not have.

    Raises:
        ValueError: there are some.
    """
    if softcap is not None or sinks is not None:
        raise ValueError("keys are int8, and scores have a cap or sinks; valid: neither")


def merged(one: Sums, other: Sums) -> Sums:
    """Two sets of keys together; a maximum of -inf is of none."""
    (total, top, whole), (more, peak, sums) = one, other
    best = torch.maximum(top, peak)
    safe = torch.where(best == -torch.inf, 0.0, best)
    old, new = ((x - safe).exp() for x in (top, peak))
    none, nothing = top == -torch.inf, peak == -torch.inf
    values = torch.where(none, more, torch.where(nothing, total, total * old + more * new))
    both = torch.where(none, sums, torch.where(nothing, whole, whole * old + sums * new))
    return values, best, both


def _attended(
    segment: Segment,
    query: Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One text's rows (n, H, d): for each, tiles make chunks, chunks spans, and spans the whole."""
    cache, (count, heads, width) = segment.cache, query.shape
    keys, values = cache.data[2 * layer], cache.data[2 * layer + 1]
    packed = query.float().view(count, len(keys), -1, width)
    paths = row_paths(count, segment.parents)
    here = cache.length + torch.tensor([len(path) - 1 for path in paths], device=query.device)
    nodes = torch.zeros(count, max(map(len, paths)), dtype=torch.long, device=query.device)
    for row, path in enumerate(paths):
        nodes[row, : len(path)] = torch.tensor(path)
    final = int(here.max())

    def empty() -> Sums:
        top = packed.new_full((*packed.shape[:-1], 1), -torch.inf)
        return torch.zeros_like(packed), top, torch.zeros_like(top)

    def tile_of(sums: Sums, start: int) -> Sums:
        places = torch.arange(start, min(start + TILE, final + 1), device=query.device)
        seen = places <= here[:, None]
        if window and cache.ordered:
            seen &= places > here[:, None] - window
        own = (places - cache.length).clamp(0, nodes.shape[1] - 1).expand(count, -1)
        slots = torch.where(places < cache.length, places, cache.length + nodes.gather(1, own))
        slots = torch.where(seen, slots, 0)
        key, value = (part[:, slots].float() for part in (keys, values))
        scores = torch.einsum("nkgd,knjd->nkgj", packed, key) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = seen[:, None, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        acc, peak, total = sums
        best = torch.maximum(peak, scores.amax(-1, keepdim=True))
        safe = torch.where(best == -torch.inf, 0.0, best)
        p, old = torch.where(seen, (scores - safe).exp(), 0.0), (peak - safe).exp()
        value = torch.where(seen.permute(1, 0, 2, 3)[..., 0, :, None], value, 0.0)
        mixed = torch.einsum("nkgj,knjd->nkgd", p.to(keys.dtype).float(), value)
        return acc * old + mixed, best, total * old + p.sum(-1, keepdim=True)

    total = empty()
    for span in range(0, final + 1, SPAN * CHUNK):
        part = empty()
        for chunk in range(span, min(span + SPAN * CHUNK, final + 1), CHUNK):
            sums = empty()
            for start in range(chunk, min(chunk + CHUNK, final + 1), TILE):
                sums = tile_of(sums, start)
            part = merged(part, sums)
        total = merged(total, part)
    if sinks is not None:
        sink = sinks.float().view(len(keys), -1, 1).expand_as(total[1])
        total = merged(total, (torch.zeros_like(total[0]), sink, torch.ones_like(sink)))
    return (total[0] / total[2]).reshape(count, heads, width).to(query.dtype)
