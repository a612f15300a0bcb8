"""What attention is computed from, and the parts of it that torch has no function for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kv.cache import KVCache
from tokenswift.tree import ancestor_mask

#: the biases of a segment's rows, by committed keys, window, and query heads of a KV head
Masks: TypeAlias = dict[tuple[int, int, int], Tensor]


@dataclass(slots=True)
class AttentionContext:
    """What the queries of one segment attend to in one layer.

    Attributes:
        layer: its number.
        cache: the segment's cache, with the pass's own keys and values in the scratch rows.
        parents: see `passes.Segment`.
        scale: what products of queries and keys are multiplied with.
        window: newest keys that a row sees, itself included; 0: all.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        sinks: a score for each head that takes part in the softmax and has no value (gpt-oss).
        masks: masks that layers of a pass share; None: they are computed anew.
    """

    layer: int
    cache: KVCache
    parents: Sequence[int] | None
    scale: float
    window: int = 0
    softcap: float | None = None
    sinks: Float[Tensor, " H"] | None = None
    masks: Masks | None = None


def capped(
    query: Float[Tensor, "1 K m d"],
    key: Float[Tensor, "1 K L d"],
    value: Float[Tensor, "1 K L d"],
    bias: Float[Tensor, "m L"] | None,
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "1 K m d"]:
    """Attention with capped scores or sinks, in float32 at least."""
    kind = torch.promote_types(key.dtype, torch.float32)
    scores = query.to(kind) @ key.to(kind).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        kv_heads, rows = query.shape[1:3]
        rows_per_head = rows * kv_heads // len(sinks)
        of_heads = sinks.to(scores.dtype).view(kv_heads, -1, 1)
        of_rows = of_heads.expand(-1, -1, rows_per_head).reshape(1, kv_heads, rows, 1)
        scores = torch.cat([scores, of_rows], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.to(kind)


def attention_bias(
    before: int, rows: int, parents: Sequence[int] | None, window: int, like: Tensor
) -> Float[Tensor, "n L"]:
    """The attention bias: -inf where a row does not see a key, else 0."""
    device = like.device
    mask = ancestor_mask(range(-1, rows - 1) if parents is None else parents, device)
    visible = torch.cat([mask.new_ones(rows, before), mask], dim=1)
    if window:
        of_rows = before + mask.sum(1) - 1
        of_keys = torch.cat([torch.arange(before, device=device), of_rows])
        visible &= of_keys[None, :] > of_rows[:, None] - window
    bias = torch.zeros(visible.shape, dtype=like.dtype, device=device)
    return bias.masked_fill_(~visible, -torch.inf)


def rotated(
    states: Float[Tensor, "*h n d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"]
) -> Float[Tensor, "*h n d"]:
    """Rotary embedding: pairs (j, j + d/2) rotated by the angles of each row's position."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
