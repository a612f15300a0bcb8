"""The paper's partial cache, and the selection of its positions.

:class:`SparseCache` holds a fixed number of selected tokens, for draft passes alone: a verify pass
never reads it. A policy gives every cached position an importance, (K, T) float32 for each layer,
and :func:`choose` selects by it. Recent tokens that a policy always keeps get the greatest
importance.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import proxy

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kv.cache import FullCache, KVCache, Tail
from tokenswift.kv.memory import to_device

OBSERVED = 32  # queries of SnapKV's observation window
POOL = 5  # neighbours that SnapKV averages over


class SparseCache(KVCache):
    """B slots per layer and KV head for selected tokens, and scratch rows for draft passes.

    The first S slots hold sinks and are never replaced. A new committed token takes a free slot, or
    replaces the next one in a ring over the other slots; as a selection is loaded in rising
    importance, the least important tokens are replaced first. Keys keep the rotary position they
    were written with, so the order of slots does not matter. Layers in the full cache's tail are
    read there.

    Draft passes write behind the slots: :meth:`grow` keeps rows of the last pass as context of the
    next one, :meth:`rewind` drops them, :meth:`commit_drafted` moves them into slots.

    Args:
        like: a full cache, for layers, heads, width, dtype and device.
        budget: B, at least ``sinks + 1``.
        sinks: S, first positions always held.
        scratch: rows of draft passes.
    """

    ordered = False

    def __init__(self, like: FullCache, budget: int, sinks: int, scratch: int) -> None:
        self.is_long = like.is_long
        self.budget = budget
        self.sinks = sinks
        self.scratch = scratch
        # weak, so that a drafter does not keep the full cache of an ended sequence
        reads_full = like.tail is not None or like.states is not None
        self._full: FullCache | None = proxy(like) if reads_full else None
        if like.states is not None:
            self.states = like.states.fork()
        self.entries = like.entries.like(budget + scratch)
        self.data = self.entries.data.zero_()  # no NaN in unused slots
        self.work = torch.empty(0, dtype=torch.uint8, device="cpu")
        #: position in the sequence of every slot, (layers, K, B)
        shape = (like.layers, like.entries.kv_heads, budget)
        self.positions = torch.zeros(shape, dtype=torch.long, device=like.data.device)
        self.filled = 0
        self.drafted = 0  # scratch rows kept as context
        self.replaced = 0  # slots taken by newer tokens since the last selection
        self.selections = 0
        self._next = sinks  # the slot to replace next

    @property
    def length(self) -> int:
        """Entries that a draft pass attends to besides its own tokens."""
        return self.filled + self.drafted

    @property
    def tail(self) -> Tail | None:
        """The full cache's."""
        return None if self._full is None else self._full.tail

    @property
    def tail_length(self) -> int:
        """See :class:`KVCache`."""
        if self._full is None or self._full.tail is None:
            return self.length
        return self._full.tail_length + self.drafted

    def make_room(self, rows: int) -> None:
        """See :class:`KVCache`."""
        if self._full is not None and self._full.tail is not None:
            self._full.make_room(self.drafted + rows)

    @property
    def exhausted(self) -> bool:
        """Whether newer tokens have replaced the whole selection, or none was made yet."""
        return not self.selections or self.replaced >= self.budget - self.sinks

    # ---- draft passes ----------------------------------------------------------------------------

    def grow(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last pass as context of the next one."""
        if self.states is not None:
            self.states.commit(range(rows))
        self.drafted += rows

    def rewind(self, rows: int = 0) -> None:
        """Drop all draft rows but the first ``rows``.

        Raises:
            ValueError: not all are dropped, and the model has recurrent layers.
        """
        if self.states is not None and self._full is not None and self._full.states is not None:
            if rows:
                raise ValueError(f"{rows} draft rows are left of recurrent layers; valid: 0")
            self.states = self._full.states.fork()
        self.drafted = rows

    def commit_drafted(self, rows: int, start: int) -> None:
        """Move the first ``rows`` draft rows into slots, as positions from ``start`` on; drop the
        others."""
        self.drafted = 0
        if rows:
            self._put(self, self.filled, rows, start)

    # ---- committed tokens ------------------------------------------------------------------------

    def load(self, full: FullCache, chosen: list[Int[Tensor, "K n"]]) -> None:
        """Replace all slots by a selection from the full cache.

        Args:
            chosen: for each layer, n ≤ B positions of each KV head: sinks, then others in rising
                importance.
        """
        chosen = [positions.to(self.data.device) for positions in chosen]
        self.filled = chosen[0].shape[1] if chosen else 0
        for layer, positions in enumerate(chosen):
            self.positions[layer, :, : self.filled] = positions
        if chosen:
            self.entries.copy(full.entries, range(self.filled), torch.cat(chosen))
        self.drafted = 0
        self.replaced = 0
        self._next = self.sinks
        self.selections += 1

    def append(self, full: FullCache, start: int, end: int) -> None:
        """Copy the newly committed positions [start, end) of the full cache into slots."""
        self._put(full, start, end - start, start)

    def _put(self, source: FullCache | SparseCache, first: int, count: int, start: int) -> None:
        """Copy ``count`` entries of ``source``, from ``first`` on, into slots, as positions from
        ``start`` on; of more than fit, the newest."""
        ring = self.budget - self.sinks
        free = min(count, self.budget - self.filled)
        over = count - free  # entries that replace others
        slots = list(range(self.filled, self.filled + free))
        slots += [self.sinks + (self._next - self.sinks + i) % ring for i in range(over)]
        if over:
            self._next = self.sinks + (self._next - self.sinks + over) % ring
        if over > ring:  # more than one turn of the ring: only the last one stays
            slots = slots[:free] + slots[free:][-ring:]
        copied = [*range(free), *range(max(free, count - ring), count)]
        self.filled += free
        self.replaced += count
        self.entries.copy(source.entries, slots, [first + index for index in copied])
        into = to_device(slots, self.data.device)
        self.positions[:, :, into] = to_device(copied, self.data.device) + start

    def turn_sinks(self, by: int, frequencies: Float[Tensor, " half"], origin: Tensor) -> None:
        """Rotate the sinks' keys as if they stood ``by`` positions later (StreamingLLM, Xiao et al.
        2024).

        Args:
            frequencies: the model's rotary frequencies, (d / 2,).
            origin: the sinks' keys as first written, (layers, K, S, d).
        """
        self.entries.put_keys(0, _rotated_later(origin, by, frequencies))

    def turn_window(self, by: int, frequencies: Float[Tensor, " half"]) -> None:
        """Rotate the keys of all slots but the sinks as if they stood ``by`` positions later.

        Each turn rounds the keys once in the cache's dtype, so turn seldom and far.
        """
        keys = self.entries.keys(slice(None), self.sinks, self.filled)
        self.entries.put_keys(self.sinks, _rotated_later(keys, by, frequencies))


def _rotated_later(keys: Tensor, by: int, frequencies: Float[Tensor, " half"]) -> Tensor:
    """Rotated keys (…, d) in float32 as if written ``by`` positions later."""
    angle = (by * frequencies.double()).float()
    cos = angle.cos().repeat(2)
    sin = angle.sin().repeat(2)
    first, second = keys.float().chunk(2, dim=-1)
    return keys.float() * cos + torch.cat([-second, first], dim=-1) * sin


# ---- the selection -------------------------------------------------------------------------------


def choose(importance: Float[Tensor, "K T"], budget: int, sinks: int) -> Int[Tensor, "K n"]:
    """Positions to select (T > B): sinks, then the most important others in rising importance."""
    first = torch.arange(sinks, device=importance.device).expand(len(importance), -1)
    best = importance[:, sinks:].topk(budget - sinks, dim=1).indices + sinks
    return torch.cat([first, best.flip(1)], dim=1)


def useful_budget(budget: int, windows: Sequence[int | None], sinks: int) -> int:
    """The budget, cut to sinks and the widest window where every layer has a window: no layer sees
    more."""
    widths = [window for window in windows if window is not None]
    if not widths or len(widths) < len(windows):
        return budget
    return min(budget, sinks + max(widths))


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
    """Select positions for a :class:`SparseCache`, for each layer; all positions if they fit.

    Args:
        policy: "important" (paper 3.3), "recent" (StreamingLLM's window), "snapkv" (SnapKV, Li et
            al. 2024: pooled attention of the newest queries) or "chunks" (TriForce, Sun et al.
            2024: whole chunks by the newest query's product with their mean key).
        queries: per layer, rotated queries of the pass that holds the newest cached token.
        row: the newest token's row in it; the rows before it are its predecessors.
        windows: sliding window of each layer, in tokens. Besides sinks, a layer holds positions of
            its window, filled up with the newest positions before it, as the least important, since
            all layers hold equally many.
        chunk: tokens of a chunk.
    """
    total = full.length
    budget = useful_budget(budget, windows, sinks)
    if total <= budget:
        every = torch.arange(total, device=full.data.device)
        return [every.expand(full.entries.kv_heads, -1)] * full.layers
    selected: list[Tensor] = []
    for layer, query in enumerate(queries):
        keys = full.keys(layer)
        if policy == "chunks":
            recent = max(chunk, budget // 8)
            importance = _chunks(_grouped(query, row, len(keys)), keys, chunk, recent, sinks)
        else:
            importance = _importance(policy, query, row, keys)
        window = windows[layer]
        if window is not None and total > window:
            importance = _within(importance, window)
        selected.append(choose(importance, budget, sinks))
    return selected


def _importance(
    policy: str, query: Float[Tensor, "H n d"], row: int, keys: Float[Tensor, "K T d"]
) -> Float[Tensor, "K T"]:
    """The importance of positions to one layer, by a policy other than "chunks"."""
    if policy == "recent":
        positions = torch.arange(keys.shape[1], device=keys.device)
        return positions.float().expand(len(keys), -1)
    if policy == "snapkv":
        return _snapkv(query[:, max(0, row + 1 - OBSERVED) : row + 1], keys)
    newest = _grouped(query, row, len(keys)).to(keys.dtype)
    return (keys @ newest[:, :, None]).squeeze(2).float()


def _within(importance: Float[Tensor, "K T"], window: int) -> Float[Tensor, "K T"]:
    """Positions before a window become less important than all in it, the newest the most."""
    total = importance.shape[1]
    inside = importance[:, total - window :]
    before = torch.arange(window - total, 0, device=importance.device)  # rising to -1
    return torch.cat([inside.amin(1, keepdim=True) + before, inside], dim=1)


def _grouped(query: Float[Tensor, "H n d"], row: int, kv_heads: int) -> Float[Tensor, "K d"]:
    """The newest token's queries, summed over the heads that share a KV head."""
    return query[:, row].view(kv_heads, -1, query.shape[-1]).sum(1)


def _recent_first(importance: Float[Tensor, "K T"], count: int) -> Float[Tensor, "K T"]:
    """Raise the last ``count`` positions above all others, the newest highest."""
    total = importance.shape[1]
    top = importance.amax() if total else importance.new_zeros(())
    rising = torch.arange(1, count + 1, device=importance.device)
    importance[:, total - count :] = top + rising
    return importance


def _snapkv(queries: Float[Tensor, "H w d"], keys: Float[Tensor, "K T d"]) -> Float[Tensor, "K T"]:
    heads, seen, width = queries.shape
    kv_heads, total, _ = keys.shape
    packed = queries.to(keys.dtype).reshape(kv_heads, -1, width)  # (K, groups · w, d)
    scores = (packed @ keys.transpose(1, 2)).float() * width**-0.5
    positions = torch.arange(total, device=keys.device)
    of_queries = torch.arange(total - seen, total, device=keys.device)
    future = positions[None] > of_queries[:, None]
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
