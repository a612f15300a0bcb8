"""The attention function that transformers' models run through.

Registered under :data:`NAME`. It receives rotated queries (1, H, n, d) and the keys and values of our
cache with un-repeated KV heads (1, K, L, d). The queries of a group are packed as rows of their KV
head, so the cache is read once and never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "tokenswift"


@dataclass(slots=True)
class PassContext:
    """What the attention function needs to know of the pass under way.

    Attributes:
        mask: (n, n), token i of the pass sees token j of the same pass.
        positions: (n,) positions of the pass's tokens.
        prefix: entries of the cache before the pass.
        prefix_ordered: whether cache entry i is position i (the full cache).
        dtype: dtype to compute attention in; None: the model's.
        queries: filled with each layer's rotated queries.
    """

    mask: Tensor
    positions: Tensor
    prefix: int
    prefix_ordered: bool
    dtype: torch.dtype | None = None
    queries: list[Tensor] = field(default_factory=list)
    _bias: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, groups: int, like: Tensor) -> Tensor:
        """The additive mask (1, 1, groups · n, prefix + n) of the pass, made once per kind of layer."""
        key = (window, groups)
        if key not in self._bias:
            visible = torch.cat([self.mask.new_ones(len(self.positions), self.prefix), self.mask], dim=1)
            if window is not None and self.prefix_ordered:
                first = torch.arange(self.prefix, device=self.positions.device)
                places = torch.cat([first, self.positions])
                visible = visible & (places[None, :] > self.positions[:, None] - window)
            bias = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
            bias.masked_fill_(~visible, -torch.inf)
            self._bias[key] = bias.repeat(groups, 1)[None, None]
        return self._bias[key]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tokenswift_pass: PassContext | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of one layer: (1, H, n, d) × (1, K, L, d) → (1, n, H, d).

    Raises:
        ValueError: when called without a pass context, that is, not through `models.target`.
    """
    if tokenswift_pass is None:
        raise ValueError(f"attention {NAME!r} works only under tokenswift's decode loop")
    context = tokenswift_pass
    context.queries.append(query)
    _, heads, rows, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    packed = query.reshape(1, kv_heads, groups * rows, width)
    windowed = sliding_window is not None and sliding_window < length
    bias = None
    dtype = query.dtype
    if context.dtype is not None:
        packed, key, value = packed.to(context.dtype), key.to(context.dtype), value.to(context.dtype)
    if rows > 1 or (windowed and context.prefix_ordered):
        bias = context.bias(sliding_window if windowed else None, groups, packed)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scaling)
    return out.to(dtype).reshape(1, heads, rows, width).transpose(1, 2), None


AttentionInterface.register(NAME, attention)
