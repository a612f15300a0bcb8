"""The memory of keys and values: a slot for each token (`kv.cache` says the terms)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kv.memory import large_empty, to_device


class LayerEntries(NamedTuple):
    """Where the entries of one layer are.

    Attributes:
        data: the tensor that holds them, (2 · layers, K, capacity, d).
        index: the layer's number in it.
        length: entries before those of the pass.
        ordered: whether they are in order of position.
    """

    data: Tensor
    index: int
    length: int
    ordered: bool

    @property
    def keys(self) -> Float[Tensor, "K capacity d"]:
        """Its keys, those of the pass included."""
        return self.data[2 * self.index]

    @property
    def values(self) -> Float[Tensor, "K capacity d"]:
        """Its values, those of the pass included."""
        return self.data[2 * self.index + 1]


class Entries:
    """The memory of a cache: a slot for each token, with its keys and values.

    Args:
        layers, kv_heads, width: L, K and d.
        capacity: slots.
        dtype, device: of the numbers.

    Attributes:
        data: (2 · layers, K, capacity, d): layer l's keys at index 2l, its values at 2l + 1.
    """

    layers: int
    kv_heads: int
    capacity: int
    data: Tensor

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        width: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.layers = layers
        self.kv_heads = kv_heads
        self.capacity = capacity
        self.data = large_empty(2 * layers, kv_heads, capacity, width, dtype=dtype, device=device)

    def like(self, capacity: int) -> Entries:
        """The same with another capacity, uninitialised."""
        _, kv_heads, _, width = self.data.shape
        return Entries(self.layers, kv_heads, width, capacity, self.data.dtype, self.data.device)

    def copy(
        self, source: Entries, into: Sequence[int], rows: Sequence[int] | Int[Tensor, "LK n"]
    ) -> None:
        """Copy n entries of all layers and heads.

        Args:
            source: the memory copied from; may be this one.
            into: slots that are written.
            rows: slots of ``source`` that are read, the same for all layers and heads or (L · K,
                n).
        """
        device = self.data.device
        to_slots = to_device(into, device)
        if not isinstance(rows, Tensor):
            entries = source.data.index_select(2, to_device(rows, device))
            self.data.index_copy_(2, to_slots, entries)
            return
        _, kv_heads, capacity, width = source.data.shape
        head_starts = torch.arange(kv_heads, device=device)[:, None] * capacity
        for layer, from_slots in enumerate(rows.view(self.layers, kv_heads, -1)):
            flat_slots = (from_slots + head_starts).flatten()
            for part in (2 * layer, 2 * layer + 1):
                entries = source.data[part].flatten(0, 1).index_select(0, flat_slots)
                self.data[part].index_copy_(1, to_slots, entries.view(kv_heads, -1, width))

    def copy_first(self, source: Entries, length: int) -> None:
        """Copy the first ``length`` entries."""
        self.data[:, :, :length] = source.data[:, :, :length]

    def drop(self, count: int) -> None:
        """Drop the first ``count`` entries and move the others to the front. It is a multiple of
        `cache.CHUNK`, so that attention sums the others in the chunks in which it always has."""
        for part in self.data:  # a copy of one at a time
            part[:, : part.shape[1] - count] = part[:, count:].clone()

    def keys(self, layers: slice, start: int, end: int) -> Float[Tensor, "L K n d"]:
        """Keys of slots ``start`` to ``end``, in floats."""
        return self.data[0::2][layers, :, start:end]

    def put_random(self, generator: torch.Generator) -> None:
        """Fill all slots with random keys and values from -1 to 1, for checks and benchmarks."""
        random = torch.rand(self.data.shape, generator=generator, dtype=torch.float32)
        self.data.copy_(2 * random - 1)

    def put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        """Write keys into slots from ``start`` on."""
        self.data[0::2, :, start : start + keys.shape[2]] = keys.to(self.data.dtype)
