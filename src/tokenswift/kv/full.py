"""The full KV cache: allocated once, written in place, committed by compaction; and memory in large pages."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kv import KVCache

#: positions at whose multiples the kernels' chunks of attention end
CHUNK = 256
#: entries that layers with windows keep beside them at least: a text may go on from before its end
BACK = 1024
_LEAST = 1 << 22  # bytes below which it does not matter
_PAGE = mmap.PAGESIZE  # 4 KiB on x86-64; 4, 16 or 64 on arm64
_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux
_SLAB = 1 << 26  # bytes that an arena takes at a time
_LINE = 64  # bytes of a cache line


class Entries:
    """Memory of a cache: keys and values of the tokens in its slots.

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
        """Others, of another capacity."""
        _, kv_heads, _, width = self.data.shape
        return Entries(self.layers, kv_heads, width, capacity, self.data.dtype, self.data.device)

    def copy(self, source: Any, into: Sequence[int], rows: Sequence[int] | Int[Tensor, "LK n"]) -> None:
        """Copy entries of all layers and heads to slots ``into``, one after the other.

        Args:
            source: where they are; may be this one.
            rows: their slots there, or those of each layer and head.
        """
        to, device = to_device(into, self.data.device), self.data.device
        if not isinstance(rows, Tensor):
            self.data.index_copy_(2, to, source.data.index_select(2, to_device(rows, device)))
            return
        _, kv_heads, capacity, width = source.data.shape
        first = torch.arange(kv_heads, device=device)[:, None] * capacity  # rows before a head's
        for layer, places in enumerate(rows.view(self.layers, kv_heads, -1)):
            for part in (2 * layer, 2 * layer + 1):
                entries = source.data[part].flatten(0, 1).index_select(0, (places + first).flatten())
                self.data[part].index_copy_(1, to, entries.view(kv_heads, -1, width))

    def copy_first(self, source: Any, length: int) -> None:
        """Copy the first ``length`` entries."""
        self.data[:, :, :length] = source.data[:, :, :length]

    def drop(self, count: int) -> None:
        """Drop the first entries, a multiple of :data:`CHUNK`; the others become the first ones."""
        at = count * self.data.shape[2] // self.capacity  # in pages, where they are
        for part in self.data:  # a copy of one at a time
            part[:, : part.shape[1] - at] = part[:, at:].clone()

    def keys(self, layers: slice, start: int, end: int) -> Float[Tensor, "L K n d"]:
        """Keys of slots as numbers."""
        return self.data[0::2][layers, :, start:end]

    def put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        """Write keys of slots from ``start`` on."""
        self.data[0::2, :, start : start + keys.shape[2]] = keys.to(self.data.dtype)

    def fill_random(self) -> None:
        """Random entries in all slots, for measuring."""
        self.data.normal_()


class Tail:
    """The newest entries of layers with windows: whole chunks that no row will see are dropped.

    Args:
        entries: their room.
        windows: of all layers of the model, in tokens; None: the layer sees everything, and is not in here.
        dropped: positions before the first entry.

    Attributes:
        places: of each layer, whether it is in here, and its number among those that are, or are not.
        reach: the widest window.
    """

    def __init__(self, entries: Entries, windows: Sequence[int | None], dropped: int = 0) -> None:
        self.entries, self.windows, self.dropped = entries, windows, dropped
        self.reach = max(window for window in windows if window is not None)
        apart = [window is not None for window in windows]
        self.places = [(own, apart[:layer].count(own)) for layer, own in enumerate(apart)]

    def first(self, length: int) -> int:
        """The first position that is kept of a text of a length when room is made."""
        return max(self.dropped, (length + 1 - self.reach - BACK) // CHUNK * CHUNK)

    def make_room(self, length: int, rows: int) -> None:
        """See that rows fit behind a text's first ``length`` entries."""
        if length - self.dropped + rows <= self.entries.capacity:
            return
        first = self.first(length)
        self.entries.drop(first - self.dropped)
        self.dropped = first
        if (needed := length - first + rows) > self.entries.capacity:
            held, self.entries = self.entries, self.entries.like(needed)
            self.entries.copy_first(held, held.capacity)

    def fork(self, capacity: int, length: int) -> Tail:
        """A copy, as of a text's first ``length`` entries."""
        kept = length - self.dropped
        made = self.entries.like(max(kept, tail_room(self.windows, capacity)))
        made.copy_first(self.entries, kept)
        return Tail(made, self.windows, self.dropped)


def tail_room(windows: Sequence[int | None], capacity: int) -> int:
    """Entries of layers with windows that a cache for so many tokens has room for; 0 without such layers."""
    widest = max((window for window in windows if window is not None), default=-2 * BACK)
    return min(capacity, widest + 2 * BACK)


class FullCache(KVCache):
    """Keys and values of every committed token, and scratch room for the pass under way.

    A pass writes its n entries behind the committed ones; ``commit`` moves the accepted ones into place, and
    whatever is not committed is overwritten by the next pass.

    Args:
        entries: room for as many tokens as fit, scratch room included.
        length: of the entries that are there.
        tail: of layers with windows, if they are not in ``entries``.
    """

    ordered = True  # entry i is position i

    def __init__(self, entries: Entries, length: int = 0, tail: Tail | None = None) -> None:
        self.entries, self.data, self._length, self.tail = entries, entries.data, length, tail
        self.work = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.layers, self.capacity = entries.layers, entries.capacity

    @property
    def length(self) -> int:
        """T, the committed tokens."""
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
        """Whether a text can go on behind the first ``length`` entries."""
        tail = self.tail
        return length <= self._length and (tail is None or tail.dropped <= max(0, length + 1 - tail.reach))

    def commit(self, nodes: tuple[int, ...]) -> None:
        """Keep rows ``nodes`` (ascending) of the last pass as the next committed tokens."""
        start = self._length
        # Rows that stand where they belong need no copy: the root always, the whole chain often.
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
        """Forget the committed entries behind the first ``length``."""
        self._length = min(length, self._length)

    def slide(self, count: int) -> None:
        """Keep the last ``count`` entries alone, of floats; they become the first ones."""
        start = self._length - count
        if start > 0:
            self.data[:, :, :count] = self.data[:, :, start : self._length].clone()
            self._length = count

    def fill_random(self, length: int) -> None:
        """Random entries in all slots, for measuring, as of a text of a length."""
        self.entries.fill_random()
        self._length = length
        if self.tail is not None:
            self.tail.entries.fill_random()
            self.tail.dropped = self.tail.first(length)

    def fork(self, capacity: int, length: int | None = None) -> FullCache:
        """A copy of the committed entries with room of its own; neither sees what the other does next.

        Args:
            capacity: tokens that fit the copy, at least as many as are copied.
            length: of the first so many entries, up to T; None: of all.
        """
        length = self._length if length is None else length
        if length > self._length:
            raise ValueError(f"length is {length}; the cache holds {self._length} tokens")
        if capacity < length:
            raise ValueError(f"capacity is {capacity}; {length} tokens are to be copied")
        if not self.holds(length):
            raise ValueError(f"length is {length}; what layers with windows see there is not held any more")
        made = self.entries.like(capacity)
        made.copy_first(self.entries, length)
        return FullCache(made, length, None if self.tail is None else self.tail.fork(capacity, length))

    def keys(self, layer: int) -> Tensor:
        """Committed keys of a layer as numbers, (K, T, d)."""
        return self.entries.keys(slice(layer, layer + 1), 0, self._length)[0]


# ---- memory -----------------------------------------------------------------------------------------------


def large_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor; on the CPU the system is asked to back it by large pages (Linux)."""
    made = torch.empty(*shape, dtype=dtype, device=device)
    size, at = made.numel() * made.element_size(), made.data_ptr()
    if made.device.type == "cpu" and size >= _LEAST and sys.platform == "linux":
        start = -(-at // _PAGE) * _PAGE
        # a wish: where the system does not grant it, nothing changes
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t((at + size - start) // _PAGE * _PAGE), _HUGEPAGE
        )
    return made


class Arena:
    """Memory in large pages that many tensors share, such as the weights of a model's layers. A small page
    ends what a processor fetches ahead of a loop. Memory goes back with the last tensor in it."""

    def __init__(self) -> None:
        self._slab, self._used = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the CPU, at the beginning of a cache line."""
        size = math.prod(shape) * dtype.itemsize
        if size >= _SLAB // 4:
            return large_empty(*shape, dtype=dtype)
        if self._used + size > len(self._slab):
            self._slab = large_empty(_SLAB, dtype=torch.uint8)
            self._used = -self._slab.data_ptr() % _LINE
        start, self._used = self._used, self._used + -(-size // _LINE) * _LINE
        return self._slab[start : start + size].view(dtype).view(shape)


def to_device(numbers: Sequence[Any], device: torch.device | str) -> Tensor:
    """Numbers as a tensor on a device, without waiting for the device; of none, whole ones."""
    device, dtype = torch.device(device), None if numbers else torch.long
    made = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)
