"""Which positions of the full cache a sparse cache holds.

A policy gives every cached position of a layer an importance, (K, T) float32; :func:`choose` makes the
selection. Recent tokens that a policy always keeps come out as the most important, the newest last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kv.full import FullCache

POLICIES = ("important", "recent", "snapkv", "chunks")
OBSERVED = 32  # queries of SnapKV's observation window
POOL = 5  # neighbours that SnapKV averages over


def choose(importance: Float[Tensor, "K T"], budget: int, sinks: int) -> Int[Tensor, "K n"]:
    """Positions to hold (T > B): sinks, then the most important others in rising importance."""
    head = torch.arange(sinks, device=importance.device).expand(len(importance), -1)
    best = importance[:, sinks:].topk(budget - sinks, dim=1).indices + sinks
    return torch.cat([head, best.flip(1)], dim=1)


def useful(budget: int, windows: Sequence[int | None], sinks: int) -> int:
    """The budget, or what sinks and the widest window come to where every layer has a window: no layer
    of the target looks at more."""
    widths = [window for window in windows if window is not None]
    return budget if len(widths) < len(windows) or not widths else min(budget, sinks + max(widths))


def select(
    policy: str,
    full: FullCache,
    queries: Sequence[Float[Tensor, "H n d"]] | Float[Tensor, "L H n d"],
    row: int,
    windows: Sequence[int | None],
    budget: int,
    sinks: int,
    chunk: int = 8,
) -> list[Int[Tensor, "K s"]]:
    """Positions per layer for a :class:`~tokenswift.kv.sparse.SparseCache`; all of a text that fits.

    Args:
        policy: "important" (paper 3.3), "recent" (StreamingLLM's window), "snapkv" (SnapKV, Li et al.
            2024: pooled attention of the newest queries) or "chunks" (TriForce, Sun et al. 2024: whole
            chunks by the newest query's product with their mean key).
        queries: per layer, rotated queries of the pass that holds the newest cached token.
        row: the newest token's row in it; rows up to it are its predecessors in the text.
        windows: sliding window of each layer, in tokens. Besides sinks, a layer holds positions of its
            window; all layers hold equally many, so one whose window is narrower than what others
            hold is filled up with the newest positions before it, as its least important.
        chunk: tokens of a chunk.
    """
    total = full.length
    budget = useful(budget, windows, sinks)
    if total <= budget:
        return [torch.arange(total, device=full.data.device).expand(full.data.shape[1], -1)] * full.layers
    chosen = []
    for layer, query in enumerate(queries):
        keys = full.keys(layer)
        if policy == "recent":
            importance = torch.arange(total, device=keys.device).float().expand(len(keys), -1)
        elif policy == "snapkv":
            importance = _snapkv(query[:, max(0, row + 1 - OBSERVED) : row + 1], keys)
        elif policy == "chunks":
            importance = _chunks(_grouped(query, row, len(keys)), keys, chunk, max(chunk, budget // 8), sinks)
        else:
            newest = _grouped(query, row, len(keys)).to(keys.dtype)
            importance = (keys @ newest[:, :, None]).squeeze(2).float()
        window = windows[layer]
        if window is not None and total > window:
            inside = importance[:, total - window :]
            before = torch.arange(window - total, 0, device=keys.device)  # rising, the newest is -1
            importance = torch.cat([inside.amin(1, keepdim=True) + before, inside], dim=1)
        chosen.append(choose(importance, budget, sinks))
    return chosen


def _grouped(query: Float[Tensor, "H n d"], row: int, kv_heads: int) -> Float[Tensor, "K d"]:
    """The newest token's queries, summed over the heads that share a KV head."""
    return query[:, row].view(kv_heads, -1, query.shape[-1]).sum(1)


def _recent_first(importance: Float[Tensor, "K T"], count: int) -> Float[Tensor, "K T"]:
    """The same with the last ``count`` positions above all others, rising."""
    top = importance.amax() if importance.shape[1] else importance.new_zeros(())
    importance[:, importance.shape[1] - count :] = top + torch.arange(1, count + 1, device=importance.device)
    return importance


def _snapkv(queries: Float[Tensor, "H w d"], keys: Float[Tensor, "K T d"]) -> Float[Tensor, "K T"]:
    heads, seen, width = queries.shape
    kv_heads, total, _ = keys.shape
    packed = queries.to(keys.dtype).reshape(kv_heads, -1, width)  # (K, groups · w, d)
    scores = (packed @ keys.transpose(1, 2)).float() * width**-0.5
    place = torch.arange(total, device=keys.device)
    future = place[None] > (total - seen + torch.arange(seen, device=keys.device))[:, None]
    scores = scores.masked_fill(future.repeat(heads // kv_heads, 1), -torch.inf)
    attention = scores.softmax(-1).sum(1)  # over the group and the observation window
    attention = F.avg_pool1d(attention, POOL, stride=1, padding=POOL // 2, count_include_pad=False)
    return _recent_first(attention, min(seen, total))


def _chunks(
    query: Float[Tensor, "K d"], keys: Float[Tensor, "K T d"], chunk: int, recent: int, sinks: int
) -> Float[Tensor, "K T"]:
    kv_heads, total, width = keys.shape
    count = max(0, total - sinks - recent) // chunk
    end = sinks + count * chunk
    importance = keys.new_zeros(kv_heads, total, dtype=torch.float32)
    if count:
        means = keys[:, sinks:end].reshape(kv_heads, count, chunk, width).float().mean(2)
        scores = torch.einsum("kd,kcd->kc", query.float(), means)
        importance[:, sinks:end] = scores.repeat_interleave(chunk, dim=1)
    return _recent_first(importance, total - end)
