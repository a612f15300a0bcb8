"""KV caches: the protocol that a pass reads (`KVCache`), their memory, and the full cache.

An *entry* is one token's key and value, in each layer and head; a *slot* is the place of an entry
in memory. A pass over n tokens has a *row* for each, and writes their entries into n *scratch*
slots behind those of the text. In a full cache slot i is position i of the text; a partial cache,
for drafting, has some positions alone. Letters of shapes are those of `types`; where a tensor holds
all layers, L is their number.

:class:`FullCache` holds every *committed* token: one that belongs to the text for good, as drafted
ones do once they are accepted. It is allocated once; a pass writes its rows behind the committed
ones, and ``commit`` moves the accepted rows into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenswift.kv.entries import Entries, LayerEntries
from tokenswift.kv.states import States

#: attention is computed in chunks of this many positions
CHUNK = 256
#: entries before its window that a tail keeps at least, so that a text can be continued from before
#: its end
BACK = 1024


class KVCache:
    """Keys and values of committed tokens, with scratch rows for a pass; also a cache for
    transformers' code.

    Attributes:
        entries: the memory of keys and values.
        data: (2 · layers, K, capacity, d): layer l's keys at index 2l, its values at 2l + 1; keys
            and values in int8 are bytes in pages, see `kernels.cpu.int8_cache`.
        ordered: whether entry i is position i (the full cache), so that sliding windows can be
            applied.
        work: scratch memory of the kernels, in bytes, which they enlarge when they need more.
        tail: the entries of layers with sliding windows, which are then not in ``data``; None: all
            are in it.
        is_long: whether its keys are rotated by the model's frequencies for long texts, where it
            has such (`loader.rotary.Rotary`).
        states: of recurrent layers, which have no entries; None: the model has no such layers.
    """

    entries: Entries
    data: Tensor
    ordered: bool
    work: Tensor
    tail: Tail | None = None
    is_long: bool = False
    states: States | None = None

    @property
    def length(self) -> int:
        """Entries that a pass attends to besides its own tokens."""
        raise NotImplementedError

    @property
    def tail_length(self) -> int:
        """The same for layers in the :attr:`tail`."""
        raise NotImplementedError

    def make_room(self, rows: int) -> None:
        """Make room for a pass with this many rows; called before it."""
        raise NotImplementedError

    def of_layer(self, layer: int) -> LayerEntries:
        """Where a layer's entries are, in the tail or outside it."""
        if self.tail is None:
            return LayerEntries(self.data, layer, self.length, self.ordered)
        in_tail, index = self.tail.places[layer]
        if in_tail:
            return LayerEntries(self.tail.entries.data, index, self.tail_length, ordered=True)
        return LayerEntries(self.data, index, self.length, self.ordered)

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
        start = self.length
        end = start + key_states.shape[2]
        if end > self.data.shape[2]:
            raise ValueError(f"a pass needs {end} rows, the cache has {self.data.shape[2]}")
        keys = self.data[2 * layer_idx]
        values = self.data[2 * layer_idx + 1]
        keys[:, start:end] = key_states[0]
        values[:, start:end] = value_states[0]
        return keys[None, :, :end], values[None, :, :end]


class TailPlace(NamedTuple):
    """Where a layer's entries are.

    Attributes:
        in_tail: whether they are in the tail.
        index: the layer's number among those that are there, or among those that are not.
    """

    in_tail: bool
    index: int


class Tail:
    """The newest entries of layers with sliding windows; older ones are dropped in whole chunks.

    Args:
        entries: their memory.
        windows: the window of each layer of the model, in tokens; None: it sees everything, and is
            not in the tail.
        dropped: positions before the first entry.

    Attributes:
        places: where each layer of the model is.
        reach: the widest window: tokens that a token sees, itself included.
    """

    def __init__(self, entries: Entries, windows: Sequence[int | None], dropped: int = 0) -> None:
        self.entries = entries
        self.windows = windows
        self.dropped = dropped
        self.reach = max(window for window in windows if window is not None)
        self.places: list[TailPlace] = []
        counts = {True: 0, False: 0}
        for window in windows:
            in_tail = window is not None
            self.places.append(TailPlace(in_tail, counts[in_tail]))
            counts[in_tail] += 1

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
        needed = length - first + rows
        if needed > self.entries.capacity:
            larger = self.entries.like(needed)
            larger.copy_first(self.entries, self.entries.capacity)
            self.entries = larger

    def fork(self, capacity: int, length: int) -> Tail:
        """A copy for the first ``length`` tokens."""
        count = length - self.dropped
        entries = self.entries.like(max(count, tail_room(self.windows, capacity)))
        entries.copy_first(self.entries, count)
        return Tail(entries, self.windows, self.dropped)


def tail_room(windows: Sequence[int | None], capacity: int) -> int:
    """Capacity of the tail of a cache for ``capacity`` tokens; 0 without layers with windows."""
    widths = [window for window in windows if window is not None]
    if not widths:
        return 0
    # twice: what is always kept before a window, and what comes in until entries are dropped again
    return min(capacity, max(widths) + 2 * BACK)


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
        self.entries = entries
        self.data = entries.data
        self.tail = tail
        self.layers = entries.layers
        self.capacity = entries.capacity
        self.work = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._length = length

    @property
    def length(self) -> int:
        """T, the number of committed tokens."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        tail_bytes = 0 if self.tail is None else self.tail.entries.data.nbytes
        state_bytes = 0 if self.states is None else self.states.nbytes
        return self.data.nbytes + tail_bytes + state_bytes

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
        if length > self._length:
            return False
        if self.states is not None and self.states.known(length) != length:
            return False
        return self.tail is None or self.tail.dropped <= max(0, length + 1 - self.tail.reach)

    def usable(self, length: int) -> int:
        """The greatest number of first entries, up to ``length``, after which a sequence can be
        continued; 0: none."""
        if self.states is not None:
            length = self.states.known(min(length, self._length))
        return length if self.holds(length) else 0

    def mark(self) -> None:
        """Keep the states of recurrent layers as they are now, so that other texts can begin
        here."""
        if self.states is not None:
            self.states.mark()

    def commit(self, nodes: tuple[int, ...]) -> None:
        """Commit rows ``nodes`` (ascending) of the last pass."""
        start = self._length
        # Rows already in their place need no copy: the root always, a whole chain often.
        in_place = 0
        while in_place < len(nodes) and nodes[in_place] == in_place:
            in_place += 1
        if in_place < len(nodes):
            _move(self.entries, start, nodes, in_place)
            if self.tail is not None:
                _move(self.tail.entries, self.tail_length, nodes, in_place)
        if self.states is not None:
            self.states.commit(nodes)
        self._length = start + len(nodes)

    def rewind(self, length: int) -> None:
        """Drop committed entries after the first ``length``; with states, after as many of these as
        they are known for."""
        self._length = min(length, self._length)
        if self.states is not None:
            self._length = self.states.known(self._length)
            self.states.rewind(self._length)

    def slide(self, count: int) -> None:
        """Keep only the last ``count`` entries, moved to the front: of a drafter that sees no more,
        whose cache is in floats."""
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
                "which layers with windows may hold the last ones alone, and recurrent layers some "
                "states"
            )
        entries = self.entries.like(capacity)
        entries.copy_first(self.entries, length)
        tail = None if self.tail is None else self.tail.fork(capacity, length)
        fork = FullCache(entries, length, tail)
        fork.is_long = self.is_long
        if self.states is not None:
            fork.states = self.states.fork(length)
        return fork

    def keys(self, layer: int) -> Tensor:
        """Committed keys of a layer in floats, (K, T, d)."""
        return self.entries.keys(slice(layer, layer + 1), 0, self._length)[0]


def _move(entries: Entries, first: int, nodes: tuple[int, ...], in_place: int) -> None:
    """Move the entries of a pass's rows ``nodes``, which begin at slot ``first``, together; the
    first ``in_place`` of them stand where they belong."""
    into = range(first + in_place, first + len(nodes))
    entries.copy(entries, into, [first + node for node in nodes[in_place:]])
