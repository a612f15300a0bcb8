"""Parts of attention that torch has no function for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.tree import ancestor_mask


def capped(
    query: Float[Tensor, "1 K m d"],
    key: Float[Tensor, "1 K L d"],
    value: Float[Tensor, "1 K L d"],
    bias: Float[Tensor, "m L"] | None,
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "1 K m d"]:
    """Attention with capped scores or sinks, which torch's function lacks; in float32 at least."""
    kind = torch.promote_types(key.dtype, torch.float32)
    scores = query.to(kind) @ key.to(kind).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if sinks is not None:
        kv_heads, rows = query.shape[1:3]
        own = (
            sinks.to(scores.dtype)
            .view(kv_heads, -1, 1)
            .expand(-1, -1, rows * kv_heads // len(sinks))
        )
        scores = torch.cat([scores, own.reshape(1, kv_heads, rows, 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.to(kind)


def attention_bias(
    before: int, rows: int, parents: Sequence[int] | None, window: int, like: Tensor
) -> Float[Tensor, "n L"]:
    """The attention bias: -inf where a row does not see a key, else 0."""
    device = like.device
    mask = ancestor_mask(range(-1, rows - 1) if parents is None else parents, device)
    visible = torch.cat([mask.new_ones(rows, before), mask], dim=1)
    if window:
        here = before + mask.sum(1) - 1
        places = torch.cat([torch.arange(before, device=device), here])
        visible &= places[None, :] > here[:, None] - window
    bias = torch.zeros(visible.shape, dtype=like.dtype, device=device)
    return bias.masked_fill_(~visible, -torch.inf)


def turned(
    states: Float[Tensor, "*h n d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"]
) -> Float[Tensor, "*h n d"]:
    """Rotary embedding: pairs (j, j + d/2) rotated by the angles of each row's position."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
