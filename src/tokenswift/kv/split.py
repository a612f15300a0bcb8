"""Caches whose layers lie on several devices: each layer's entries where its keys arise.

A *part* is an ordinary cache of the layers of one device. All parts hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tokenswift.kv.full import FullCache
from tokenswift.kv.sparse import SparseCache

Part = TypeVar("Part", FullCache, SparseCache)


class _Split(Generic[Part]):
    """What both kinds share.

    Args:
        parts: a cache for each device.
        at: of each layer of the model, its part and its layer there.
    """

    def __init__(self, parts: Sequence[Part], at: Sequence[tuple[int, int]]) -> None:
        self.parts, self.places = list(parts), list(at)

    @property
    def ordered(self) -> bool:
        """Whether entry i is position i."""
        return self.parts[0].ordered

    @property
    def length(self) -> int:
        """Entries that a pass attends to besides its own tokens."""
        return self.parts[0].length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """:attr:`length`, under the name that transformers asks for."""
        return self.length

    def at(self, layer: int) -> tuple[int, Part, int]:
        """A layer's part, by number and itself, and its layer there."""
        part, own = self.places[layer]
        return part, self.parts[part], own

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values (1, K, n, d); return all of them (1, K, L, d)."""
        _, part, own = self.at(layer_idx)
        return part.update(key_states, value_states, own)


class SplitCache(_Split[FullCache]):
    """A `FullCache` over several devices."""

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.places)

    @property
    def capacity(self) -> int:
        """Tokens that fit, scratch room included."""
        return self.parts[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated, on all devices."""
        return sum(part.nbytes for part in self.parts)

    def clear(self) -> None:
        """Zeros everywhere."""
        for part in self.parts:
            part.clear()

    def commit(self, nodes: tuple[int, ...]) -> None:
        """See `FullCache.commit`."""
        for part in self.parts:
            part.commit(nodes)

    def fork(self, capacity: int, length: int | None = None) -> SplitCache:
        """See `FullCache.fork`."""
        return SplitCache([part.fork(capacity, length) for part in self.parts], self.places)

    def prefault(self, seconds: float) -> bool:
        """See `FullCache.prefault`."""
        return all([part.prefault(seconds / len(self.parts)) for part in self.parts])

    def keys(self, layer: int) -> Tensor:
        """Committed keys of a layer, (K, T, d), where they lie."""
        _, part, own = self.at(layer)
        return part.keys(own)


class SplitSparse(_Split[SparseCache]):
    """A `SparseCache` over several devices."""

    def __init__(self, like: SplitCache, budget: int, sinks: int, scratch: int) -> None:
        super().__init__([SparseCache(part, budget, sinks, scratch) for part in like.parts], like.places)
        self.budget, self.sinks, self.scratch = budget, sinks, scratch

    @property
    def filled(self) -> int:
        """Slots that are taken."""
        return self.parts[0].filled

    @property
    def drafted(self) -> int:
        """Scratch rows that count as context."""
        return self.parts[0].drafted

    @property
    def replaced(self) -> int:
        """Slots that newer tokens have taken since the last selection."""
        return self.parts[0].replaced

    @property
    def selections(self) -> int:
        """How often one was loaded."""
        return self.parts[0].selections

    @property
    def exhausted(self) -> bool:
        """See `SparseCache.exhausted`."""
        return self.parts[0].exhausted

    def _each(self, do: Callable[[SparseCache], object]) -> None:
        for part in self.parts:
            do(part)

    def grow(self, rows: int) -> None:
        """See `SparseCache.grow`."""
        self._each(lambda part: part.grow(rows))

    def rewind(self, rows: int = 0) -> None:
        """See `SparseCache.rewind`."""
        self._each(lambda part: part.rewind(rows))

    def settle(self, rows: int, start: int) -> None:
        """See `SparseCache.settle`."""
        self._each(lambda part: part.settle(rows, start))

    def load(self, full: SplitCache, chosen: list[Tensor]) -> None:
        """See `SparseCache.load`."""
        for number, (part, source) in enumerate(zip(self.parts, full.parts, strict=True)):
            own = [places for places, (where, _) in zip(chosen, self.places, strict=True) if where == number]
            part.load(source, own)

    def append(self, full: SplitCache, start: int, end: int) -> None:
        """See `SparseCache.append`."""
        for part, source in zip(self.parts, full.parts, strict=True):
            part.append(source, start, end)

    def first_keys(self) -> list[Tensor]:
        """See `SparseCache.first_keys`; of each part."""
        return [part.first_keys() for part in self.parts]

    def turn_sinks(self, by: int, frequencies: Tensor, origin: list[Tensor]) -> None:
        """See `SparseCache.turn_sinks`."""
        for part, keys in zip(self.parts, origin, strict=True):
            part.turn_sinks(by, frequencies.to(keys.device), keys)

    def turn_window(self, by: int, frequencies: Tensor) -> None:
        """See `SparseCache.turn_window`."""
        self._each(lambda part: part.turn_window(by, frequencies.to(part.data.device)))


def places_of(devices: Sequence[torch.device]) -> tuple[list[torch.device], list[tuple[int, int]]]:
    """The devices of layers, each once, and of each layer the number of its device and its place there."""
    found = list(dict.fromkeys(devices))
    counts = [0] * len(found)
    places = []
    for device in devices:
        part = found.index(device)
        places.append((part, counts[part]))
        counts[part] += 1
    return found, places
