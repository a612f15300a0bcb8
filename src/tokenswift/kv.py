"""KV caches, and the inputs and outputs of a model pass.

:class:`FullCache` holds every committed token. It is allocated once; a pass writes its rows behind
the committed ones, and ``commit`` moves the accepted rows into place.

:class:`SparseCache`, the paper's partial cache, holds a fixed number of selected tokens, for draft
passes alone: a verify pass never reads it. A policy gives every cached position an importance, (K,
T) float32 for each layer, and :func:`choose` selects by it. Recent tokens that a policy always
keeps get the greatest importance.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import proxy

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

#: attention is computed in chunks of this many positions
CHUNK = 256
#: entries before its window that a tail keeps at least, so that a text can be continued from before
#: its end
BACK = 1024
_LEAST = 1 << 22  # bytes from which large pages are asked for
_PAGE = mmap.PAGESIZE  # 4 KiB on x86-64; 4, 16 or 64 on arm64
_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux
_SLAB = 1 << 26  # bytes that an arena takes at a time
_LINE = 64  # bytes of a cache line
OBSERVED = 32  # queries of SnapKV's observation window
POOL = 5  # neighbours that SnapKV averages over


@dataclass(slots=True)
class Pass:
    """The result of one model pass over n tokens.

    Attributes:
        hidden: hidden states *before* the final norm (draft heads start from them).
        queries: for each layer, the rotated queries (H, n, d), by which positions are selected.
        features: the inputs of the model's ``feature_layers``; None where it has none.
        logits: float32 logits of each node of a verify pass; None for other passes.
    """

    hidden: Float[Tensor, "n D"]
    queries: Sequence[Tensor] | Tensor
    features: Float[Tensor, "k n D"] | None = None
    logits: Float[Tensor, "n V"] | None = None


@dataclass(slots=True)
class Segment:
    """The rows of one sequence in a pass.

    Attributes:
        tokens: (m,) token ids, on the host or the model's device.
        positions: (m,) their positions, on the host.
        cache: the sequence's cache; the rows' keys and values go to its scratch rows.
        parents: for each row the row before it (-1 for the root). A row sees the whole cache, its
            ancestors and itself. None: a chain.
    """

    tokens: Int[Tensor, " m"]
    positions: Int[Tensor, " m"]
    cache: KVCache
    parents: Sequence[int] | None = None


class KVCache:
    """Keys and values of committed tokens, with scratch rows for a pass; also a cache for
    transformers' code.

    Attributes:
        data: (2 · layers, K, capacity, d): layer l's keys at index 2l, its values at 2l + 1; with
            int8 (layers, K, pages, bytes of a page), see `kernels.cpu.backend`.
        ordered: whether entry i is position i (the full cache), so that sliding windows can be
            applied.
        work: scratch memory of the kernels, uint8, which they enlarge when they need more.
        tail: the entries of layers with sliding windows, which are then not in ``data``; None: all
            are in it.
    """

    data: Tensor
    ordered: bool
    work: Tensor
    tail: Any = None

    @property
    def length(self) -> int:
        """Entries that a pass attends to besides its own tokens."""
        raise NotImplementedError

    @property
    def tail_length(self) -> int:
        """The same for layers in the :attr:`tail`."""
        raise NotImplementedError

    def make_room(self, rows: int) -> None:
        """Called before a pass with this many rows."""
        raise NotImplementedError

    def of_layer(self, layer: int) -> tuple[Tensor, int, int, bool]:
        """Where a layer's entries are: the tensor, the layer's number in it, the number of entries
        before the pass, and whether these are in order of position."""
        if self.tail is None:
            return self.data, layer, self.length, self.ordered
        apart, number = self.tail.places[layer]
        if apart:
            return self.tail.entries.data, number, self.tail_length, True
        return self.data, number, self.length, self.ordered

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """:attr:`length`, under the name that transformers asks for."""
        return self.length

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values (1, K, n, d) of one layer; return views of all, (1, K, L +
        n, d).

        Raises:
            ValueError: there is no room.
        """
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.data.shape[2]:
            raise ValueError(f"a pass needs {end} rows, the cache has {self.data.shape[2]}")
        keys, values = self.data[2 * layer_idx], self.data[2 * layer_idx + 1]
        keys[:, start:end] = key_states[0]
        values[:, start:end] = value_states[0]
        return keys[None, :, :end], values[None, :, :end]


class FeatureStore(Protocol):
    """Keeps features of committed tokens, for a drafter that reads them."""

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """Take the features of the tokens at positions from ``at`` on. Each position comes once, in
        order; those of a prefix that was copied from another cache are left out."""
        ...


class Entries:
    """The memory of a cache: a slot for each token, with its keys and values.

    Args:
        layers, kv_heads, width: L, K and d.
        capacity: slots.
        dtype, device: of the numbers.

    Attributes:
        data: (2 · layers, K, capacity, d): layer l's keys at index 2l, its values at 2l + 1.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        width: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.layers, self.capacity = layers, capacity
        self.data = large_empty(2 * layers, kv_heads, capacity, width, dtype=dtype, device=device)

    def like(self, capacity: int) -> Entries:
        """The same with another capacity, uninitialised."""
        _, kv_heads, _, width = self.data.shape
        return Entries(self.layers, kv_heads, width, capacity, self.data.dtype, self.data.device)

    def copy(
        self, source: Any, into: Sequence[int], rows: Sequence[int] | Int[Tensor, "LK n"]
    ) -> None:
        """Copy entries of all layers and heads into slots ``into``.

        Args:
            source: the entries copied from; may be this one.
            rows: their slots in it, the same for all layers and heads or (L · K, n).
        """
        to, device = to_device(into, self.data.device), self.data.device
        if not isinstance(rows, Tensor):
            self.data.index_copy_(2, to, source.data.index_select(2, to_device(rows, device)))
            return
        _, kv_heads, capacity, width = source.data.shape
        first = torch.arange(kv_heads, device=device)[:, None] * capacity  # rows before a head's
        for layer, places in enumerate(rows.view(self.layers, kv_heads, -1)):
            for part in (2 * layer, 2 * layer + 1):
                entries = (
                    source.data[part].flatten(0, 1).index_select(0, (places + first).flatten())
                )
                self.data[part].index_copy_(1, to, entries.view(kv_heads, -1, width))

    def copy_first(self, source: Any, length: int) -> None:
        """Copy the first ``length`` entries."""
        self.data[:, :, :length] = source.data[:, :, :length]

    def drop(self, count: int) -> None:
        """Drop the first ``count`` entries, a multiple of :data:`CHUNK`, and move the others to the
        front."""
        at = count * self.data.shape[2] // self.capacity  # in pages, where they are
        for part in self.data:  # a copy of one at a time
            part[:, : part.shape[1] - at] = part[:, at:].clone()

    def keys(self, layers: slice, start: int, end: int) -> Float[Tensor, "L K n d"]:
        """Keys of slots ``start`` to ``end``, in floats."""
        return self.data[0::2][layers, :, start:end]

    def put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        """Write keys into slots from ``start`` on."""
        self.data[0::2, :, start : start + keys.shape[2]] = keys.to(self.data.dtype)


class Tail:
    """The newest entries of layers with sliding windows; older ones are dropped in whole chunks.

    Args:
        entries: their memory.
        windows: the window of each layer of the model, in tokens; None: it sees everything, and is
            not in here.
        dropped: positions before the first entry.

    Attributes:
        places: for each layer, whether it is in here, and its number among those that are, or are
            not.
        reach: the widest window.
    """

    def __init__(self, entries: Entries, windows: Sequence[int | None], dropped: int = 0) -> None:
        self.entries, self.windows, self.dropped = entries, windows, dropped
        self.reach = max(window for window in windows if window is not None)
        apart = [window is not None for window in windows]
        self.places = [(own, apart[:layer].count(own)) for layer, own in enumerate(apart)]

    def first(self, length: int) -> int:
        """The first position to keep once ``length`` tokens are committed."""
        return max(self.dropped, (length + 1 - self.reach - BACK) // CHUNK * CHUNK)

    def make_room(self, length: int, rows: int) -> None:
        """Make room for ``rows`` rows behind the first ``length`` tokens."""
        if length - self.dropped + rows <= self.entries.capacity:
            return
        first = self.first(length)
        self.entries.drop(first - self.dropped)
        self.dropped = first
        if (needed := length - first + rows) > self.entries.capacity:
            held, self.entries = self.entries, self.entries.like(needed)
            self.entries.copy_first(held, held.capacity)

    def fork(self, capacity: int, length: int) -> Tail:
        """A copy for the first ``length`` tokens."""
        kept = length - self.dropped
        made = self.entries.like(max(kept, tail_room(self.windows, capacity)))
        made.copy_first(self.entries, kept)
        return Tail(made, self.windows, self.dropped)


def tail_room(windows: Sequence[int | None], capacity: int) -> int:
    """Capacity of the tail of a cache for ``capacity`` tokens; 0 without layers with windows."""
    widest = max((window for window in windows if window is not None), default=-2 * BACK)
    return min(capacity, widest + 2 * BACK)


class FullCache(KVCache):
    """Keys and values of every committed token, and scratch rows for a pass.

    A pass writes its n rows behind the committed ones. ``commit`` moves the accepted ones into
    place; the next pass overwrites the others.

    Args:
        entries: the memory, scratch rows included.
        length: number of entries already committed.
        tail: entries of layers with windows, if they are not in ``entries``.
    """

    ordered = True  # entry i is position i

    def __init__(self, entries: Entries, length: int = 0, tail: Tail | None = None) -> None:
        self.entries, self.data, self._length, self.tail = entries, entries.data, length, tail
        self.work = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.layers, self.capacity = entries.layers, entries.capacity

    @property
    def length(self) -> int:
        """T, the number of committed tokens."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.data.nbytes + (0 if self.tail is None else self.tail.entries.data.nbytes)

    @property
    def tail_length(self) -> int:
        """See :class:`KVCache`."""
        return self._length if self.tail is None else self._length - self.tail.dropped

    def make_room(self, rows: int) -> None:
        """See :class:`KVCache`."""
        if self.tail is not None:
            self.tail.make_room(self._length, rows)

    def holds(self, length: int) -> bool:
        """Whether a sequence can be continued after the first ``length`` entries."""
        tail = self.tail
        return length <= self._length and (
            tail is None or tail.dropped <= max(0, length + 1 - tail.reach)
        )

    def commit(self, nodes: tuple[int, ...]) -> None:
        """Commit rows ``nodes`` (ascending) of the last pass."""
        start = self._length
        # Rows already in their place need no copy: the root always, a whole chain often.
        kept = 0
        while kept < len(nodes) and nodes[kept] == kept:
            kept += 1
        parts = [(self.entries, start)]
        if self.tail is not None:
            parts.append((self.tail.entries, self.tail_length))
        for entries, first in parts if kept < len(nodes) else ():
            into = range(first + kept, first + len(nodes))
            entries.copy(entries, into, [first + node for node in nodes[kept:]])
        self._length = start + len(nodes)

    def rewind(self, length: int) -> None:
        """Drop committed entries after the first ``length``."""
        self._length = min(length, self._length)

    def slide(self, count: int) -> None:
        """Keep only the last ``count`` entries, moved to the front (float caches only)."""
        start = self._length - count
        if start > 0:
            self.data[:, :, :count] = self.data[:, :, start : self._length].clone()
            self._length = count

    def fork(self, capacity: int, length: int | None = None) -> FullCache:
        """An independent copy of committed entries.

        Args:
            capacity: capacity of the copy, at least ``length``.
            length: number of entries to copy, up to T; None: all.
        Raises:
            ValueError: the capacity is too small, or the tail has dropped entries that are needed.
        """
        length = self._length if length is None else length
        if capacity < length or not self.holds(length):
            raise ValueError(
                f"capacity is {capacity}; {length} tokens are to be copied of {self._length}, of "
                f"which "
                "layers with windows may hold the last ones alone"
            )
        made = self.entries.like(capacity)
        made.copy_first(self.entries, length)
        return FullCache(
            made, length, None if self.tail is None else self.tail.fork(capacity, length)
        )

    def keys(self, layer: int) -> Tensor:
        """Committed keys of a layer in floats, (K, T, d)."""
        return self.entries.keys(slice(layer, layer + 1), 0, self._length)[0]


class SparseCache(KVCache):
    """B slots per layer and KV head for selected tokens, and scratch rows for draft passes.

    The first S slots hold sinks and are never replaced. A new committed token takes a free slot, or
    replaces the next one in a ring over the other slots; as a selection is loaded in rising
    importance, the least important tokens are replaced first. Keys keep the rotary position they
    were written with, so the order of slots does not matter. Layers in the full cache's tail are
    read there.

    Draft passes write behind the slots: :meth:`grow` keeps rows of the last pass as context of the
        next one,
    :meth:`rewind` drops them, :meth:`commit_drafted` moves them into slots.

    Args:
        like: a full cache, for layers, heads, width, dtype and device.
        budget: B, at least ``sinks + 1``.
        sinks: S, first positions always held.
        scratch: rows of draft passes.
    """

    ordered = False

    def __init__(self, like: FullCache, budget: int, sinks: int, scratch: int) -> None:
        self.budget, self.sinks, self.scratch = budget, sinks, scratch
        # weak, so that a drafter does not keep the full cache of an ended sequence
        self._full: FullCache | None = None if like.tail is None else proxy(like)
        self.entries = like.entries.like(budget + scratch)
        self.data = self.entries.data.zero_()  # no NaN in unused slots
        self.work = torch.empty(0, dtype=torch.uint8, device="cpu")
        #: position in the sequence of every slot, (layers, K, B)
        shape = (like.layers, like.data.shape[1], budget)
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
        return self.length if self._full is None else self._full.tail_length + self.drafted

    def make_room(self, rows: int) -> None:
        """See :class:`KVCache`."""
        if self._full is not None:
            self._full.make_room(self.drafted + rows)

    @property
    def exhausted(self) -> bool:
        """Whether newer tokens have replaced the whole selection, or none was made yet."""
        return not self.selections or self.replaced >= self.budget - self.sinks

    # ---- draft passes ----------------------------------------------------------------------------

    def grow(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last pass as context of the next one."""
        self.drafted += rows

    def rewind(self, rows: int = 0) -> None:
        """Drop all draft rows but the first ``rows``."""
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
        chosen = [places.to(self.data.device) for places in chosen]
        self.filled = chosen[0].shape[1] if chosen else 0
        for layer, places in enumerate(chosen):
            self.positions[layer, :, : self.filled] = places
        if chosen:
            self.entries.copy(full.entries, range(self.filled), torch.cat(chosen))
        self.drafted = self.replaced = 0
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
        slots = list(range(self.filled, self.filled + free))
        slots += [self.sinks + (self._next - self.sinks + i) % ring for i in range(count - free)]
        if count > free:
            self._next = self.sinks + (self._next - self.sinks + count - free) % ring
        if count - free > ring:  # more than one turn of the ring: only the last one stays
            slots = slots[:free] + slots[free:][-ring:]
        kept = [*range(free), *range(max(free, count - ring), count)]
        self.filled += free
        self.replaced += count
        self.entries.copy(source.entries, slots, [first + at for at in kept])
        into, places = to_device(slots, self.data.device), to_device(kept, self.data.device)
        self.positions[:, :, into] = places + start

    def turn_sinks(self, by: int, frequencies: Float[Tensor, " half"], origin: Tensor) -> None:
        """Rotate the sinks' keys as if they stood ``by`` positions later (StreamingLLM, Xiao et al.
        2024).

        Args:
            frequencies: the model's rotary frequencies, (d / 2,).
            origin: the sinks' keys as first written, (layers, K, S, d).
        """
        self.entries.put_keys(0, _turned(origin, by, frequencies))

    def turn_window(self, by: int, frequencies: Float[Tensor, " half"]) -> None:
        """Rotate the keys of all slots but the sinks as if they stood ``by`` positions later.

        Each turn rounds the keys once in the cache's dtype, so turn seldom and far.
        """
        keys = self.entries.keys(slice(None), self.sinks, self.filled)
        self.entries.put_keys(self.sinks, _turned(keys, by, frequencies))


def _turned(keys: Tensor, by: int, frequencies: Float[Tensor, " half"]) -> Tensor:
    """Rotated keys (…, d) in float32 as if written ``by`` positions later."""
    angle = (by * frequencies.double()).float()
    cos, sin = (torch.cat([part, part]) for part in (angle.cos(), angle.sin()))
    first, second = keys.float().chunk(2, dim=-1)
    return keys.float() * cos + torch.cat([-second, first], dim=-1) * sin


# ---- the selection -------------------------------------------------------------------------------


def choose(importance: Float[Tensor, "K T"], budget: int, sinks: int) -> Int[Tensor, "K n"]:
    """Positions to select (T > B): sinks, then the most important others in rising importance."""
    head = torch.arange(sinks, device=importance.device).expand(len(importance), -1)
    best = importance[:, sinks:].topk(budget - sinks, dim=1).indices + sinks
    return torch.cat([head, best.flip(1)], dim=1)


def useful_budget(budget: int, windows: Sequence[int | None], sinks: int) -> int:
    """The budget, cut to sinks and the widest window where every layer has a window: no layer sees
    more."""
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
    """Select positions for a :class:`SparseCache`, for each layer; all positions if they fit.

    Args:
        policy: "important" (paper 3.3), "recent" (StreamingLLM's window), "snapkv" (SnapKV, Li et
            al. 2024: pooled attention of the newest queries) or "chunks" (TriForce, Sun et al.
                2024: whole
            chunks by the newest query's product with their mean key).
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
        return [
            torch.arange(total, device=full.data.device).expand(full.data.shape[1], -1)
        ] * full.layers
    chosen = []
    for layer, query in enumerate(queries):
        keys = full.keys(layer)
        if policy == "recent":
            importance = torch.arange(total, device=keys.device).float().expand(len(keys), -1)
        elif policy == "snapkv":
            importance = _snapkv(query[:, max(0, row + 1 - OBSERVED) : row + 1], keys)
        elif policy == "chunks":
            importance = _chunks(
                _grouped(query, row, len(keys)), keys, chunk, max(chunk, budget // 8), sinks
            )
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
    """Raise the last ``count`` positions above all others, the newest highest."""
    top = importance.amax() if importance.shape[1] else importance.new_zeros(())
    importance[:, importance.shape[1] - count :] = top + torch.arange(
        1, count + 1, device=importance.device
    )
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


# ---- memory --------------------------------------------------------------------------------------


def large_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor; on Linux the system is asked for large pages for it."""
    made = torch.empty(*shape, dtype=dtype, device=device)
    size, at = made.numel() * made.element_size(), made.data_ptr()
    if made.device.type == "cpu" and size >= _LEAST and sys.platform == "linux":
        start = -(-at // _PAGE) * _PAGE
        # only advice: the system may ignore it
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t((at + size - start) // _PAGE * _PAGE), _HUGEPAGE
        )
    return made


class Arena:
    """Memory in large pages for many tensors, such as the weights of a model's layers: a
    processor's prefetch ends at a page's end. A slab is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._slab, self._used = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the CPU, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        if size >= _SLAB // 4:
            return large_empty(*shape, dtype=dtype)
        if self._used + size > len(self._slab):
            self._slab = large_empty(_SLAB, dtype=torch.uint8)
            self._used = -self._slab.data_ptr() % _LINE
        start, self._used = self._used, self._used + -(-size // _LINE) * _LINE
        return self._slab[start : start + size].view(dtype).view(shape)


def to_device(numbers: Sequence[Any], device: torch.device | str) -> Tensor:
    """A list of numbers as a tensor on a device, without waiting for the device."""
    device, dtype = torch.device(device), None if numbers else torch.long
    made = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)
