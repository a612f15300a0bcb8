"""The attention function that models run through which use transformers' own forward.

Registered under :data:`NAME`. It receives rotated queries (1, H, n, d) and writes the layer's keys and values
into our cache through its ``update``; the backend does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from tokenswift.interfaces import Segment
from tokenswift.kernels.base import Backend

NAME = "tokenswift"


@dataclass(slots=True)
class PassContext:
    """What the attention function needs to know of the pass under way, and what it notes of it.

    Attributes:
        segment: the pass's rows and their cache.
        backend: what computes attention.
        queries: filled with each layer's rotated queries (H, n, d).
        windows: filled with each layer's sliding window.
        notes: of the backend, from layer to layer.
    """

    segment: Segment
    backend: Backend
    queries: list[Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    notes: dict[Any, Any] = field(default_factory=dict)


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
    context, computes = tokenswift_pass, tokenswift_pass.backend
    layer, rows = len(context.queries), query[0].to(computes.device)  # a layer may lie on another device
    context.queries.append(rows)
    context.windows.append(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache, parents = context.segment.cache, context.segment.parents
    window = (sliding_window or 0) if cache.ordered else 0
    sinks = None if s_aux is None else s_aux.to(computes.device)
    out = computes.attend(
        rows, layer, cache, parents, scale, window, softcap=softcap, sinks=sinks, notes=context.notes
    )
    return out.to(query.device, query.dtype)[None], None


AttentionInterface.register(NAME, attention)
