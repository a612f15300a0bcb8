"""The attention function that models run through which use transformers' own forward.

Registered under :data:`NAME`. It receives rotated queries (1, H, n, d) and writes the layer's keys and values
into our cache through its ``update``. On the CPU the kernels do the rest; on CUDA torch's attention, with the
queries of a group packed as rows of their KV head, so that the cache is read once and never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tokenswift.backends.cpu.native import TYPES
from tokenswift.backends.torch import TorchKernels
from tokenswift.interfaces import KVCache
from tokenswift.tree import ancestor_mask

NAME = "tokenswift"


@dataclass(slots=True)
class PassContext:
    """What the attention function needs to know of the pass under way, and what it notes of it.

    Attributes:
        cache: the pass's cache.
        positions: (n,) positions of the pass's tokens.
        parents: the tree, or None for a chain (`interfaces.TargetModel.forward`).
        kernels: what computes attention on the CPU.
        queries: filled with each layer's rotated queries (H, n, d).
        windows: filled with each layer's sliding window.
    """

    cache: KVCache
    positions: Tensor
    parents: Sequence[int] | None
    kernels: Any
    queries: list[Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    _bias: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, groups: int, like: Tensor) -> Tensor:
        """The additive mask (1, 1, groups · n, T + n) of the pass, made once per kind of layer."""
        key = (window, groups)
        if key not in self._bias:
            rows, device, before = len(self.positions), self.positions.device, self.cache.length
            if self.parents is None:
                mask = torch.ones(rows, rows, dtype=torch.bool, device=device).tril_()
            else:
                mask = ancestor_mask(self.parents, device)
            visible = torch.cat([mask.new_ones(rows, before), mask], dim=1)
            if window is not None and self.cache.ordered:
                places = torch.cat([torch.arange(before, device=device), self.positions])
                visible = visible & (places[None, :] > self.positions[:, None] - window)
            bias = torch.zeros(visible.shape, dtype=like.dtype, device=device)
            bias.masked_fill_(~visible, -torch.inf)
            self._bias[key] = bias.repeat(groups, 1)[None, None]
        return self._bias[key]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tokenswift_pass: PassContext | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of one layer: (1, H, n, d) × (1, K, L, d) → (1, n, H, d).

    Args:
        softcap: Gemma 2's cap of the scores.
        s_aux: gpt-oss's score of a sink per head.
    Raises:
        ValueError: when called without a pass context, that is, not through `models.generic`.
    """
    if tokenswift_pass is None:
        raise ValueError(f"attention {NAME!r} works only under tokenswift's decode loop")
    context = tokenswift_pass
    layer = len(context.queries)
    context.queries.append(query[0])
    context.windows.append(sliding_window)
    _, heads, rows, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    scale = width**-0.5 if scaling is None else scaling
    extra = softcap is not None or s_aux is not None
    if extra or (query.device.type == "cpu" and key.dtype in TYPES):
        window = (sliding_window or 0) if context.cache.ordered else 0
        kernels = TorchKernels() if extra else context.kernels
        more = {"softcap": softcap, "sinks": s_aux} if extra else {}
        out = kernels.attend(query[0], layer, context.cache, context.parents, scale, window, **more)
        return out.to(query.dtype)[None], None
    groups = heads // kv_heads
    packed = query.reshape(1, kv_heads, groups * rows, width)
    windowed = sliding_window is not None and sliding_window < length and context.cache.ordered
    bias = None
    if rows > 1 or windowed:
        bias = context.bias(sliding_window if windowed else None, groups, packed)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scale)
    return out.reshape(1, heads, rows, width).transpose(1, 2), None


AttentionInterface.register(NAME, attention)
