"""Attention of a prompt that is read: torch's, whose bits are those of so many rows at once."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tokenswift.kernels.attention import capped
from tokenswift.kernels.cuda.plan import CudaBatch
from tokenswift.kernels.weights import Shape


def attend_prompt(
    batch: CudaBatch, query: Float[Tensor, "n H d"], layer: int, shape: Shape, window: int
) -> Float[Tensor, "n H d"]:
    """Attention of a chain's rows in a layer, whose keys and values of the pass stand in the cache
    already."""
    cache = batch.segments[0].cache
    count = len(query)
    end = cache.length + count
    windowed = cache.ordered and 0 < window < end
    start = max(0, cache.length - window + 1) if windowed else 0
    keys = cache.data[2 * layer, None, :, start:end]
    values = cache.data[2 * layer + 1, None, :, start:end]
    masked = windowed or shape.cap > 0
    groups = shape.heads // shape.kv_heads
    # of torch's kernels, flash alone takes fewer heads of keys; it takes neither masks nor float32
    repeats = groups > 1 and (masked or query.dtype == torch.float32)
    if repeats:
        keys = keys.repeat_interleave(groups, 1)
        values = values.repeat_interleave(groups, 1)
    queries = query.transpose(0, 1)[None]
    if not masked:
        attended = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=causal_lower_right(count, end),  # type: ignore[arg-type]
            scale=shape.scale,
            enable_gqa=groups > 1 and not repeats,
        )
        return attended[0].transpose(0, 1)
    mask = _mask(start, end, count, window if windowed else end, query.device)
    if shape.cap:
        bias = torch.zeros(mask.shape, device=query.device).masked_fill_(~mask, -torch.inf)
        attended = capped(queries, keys, values, bias, shape.scale, shape.cap, None)
        return attended.to(query.dtype)[0].transpose(0, 1)
    attended = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=shape.scale
    )
    return attended[0].transpose(0, 1)


def _mask(
    start: int, end: int, count: int, window: int, device: torch.device
) -> Bool[Tensor, "n L"]:
    """Which keys from ``start`` to ``end`` the last ``count`` positions see."""
    of_keys = torch.arange(start, end, device=device)
    of_rows = of_keys[-count:, None]
    return (of_keys <= of_rows) & (of_keys > of_rows - window)
