"""The memory of a KV cache in int8, in the pages that the kernels read (cpu_int_attention.h).

A head's key or value of a token is a row of integers with one scale. Where a layer's keys have
single channels of very large numbers, integers of 8 bits resolve nothing of the others, and its
keys are integers of 16 bits. `models/key_types.py` chooses these layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, Integer, UInt8
from torch import Tensor

from tokenswift.kernels.cpu.structs import KEY_LEVELS, PAGE, PAGE_DTYPE, SCALES, address, page_bytes
from tokenswift.kv.entries import Entries
from tokenswift.kv.memory import large_empty

#: `ts_copy` of the compiled kernels
CopyEntries: TypeAlias = Callable[..., object]


class Pages(Entries):
    """Keys and values of a cache in int8: half the memory of bfloat16, three quarters of it where
    keys are of 16 bits.

    Args:
        kv_heads, width: K and d.
        capacity: tokens that fit, rounded up to pages.
        wide_keys: of each layer, whether its keys are integers of 16 bits.
        copy_entries: ``ts_copy`` of the compiled kernels.

    Attributes:
        data: the bytes of all layers, of `structs.PAGE_DTYPE`, one layer behind the other.
    """

    def __init__(
        self,
        kv_heads: int,
        width: int,
        capacity: int,
        wide_keys: Sequence[bool],
        copy_entries: CopyEntries,
    ) -> None:
        self.layers = len(wide_keys)
        self.kv_heads = kv_heads
        self.width = width
        self.capacity = -(-capacity // PAGE) * PAGE
        self.wide_keys = tuple(wide_keys)
        self.copy_entries = copy_entries
        self.data = large_empty(self._begin_of(self.layers), dtype=PAGE_DTYPE)

    def _begin_of(self, layer: int) -> int:
        """The first byte of a layer."""
        page_sizes = (page_bytes(self.width, wide) for wide in self.wide_keys[:layer])
        return self.kv_heads * (self.capacity // PAGE) * sum(page_sizes)

    def pages(self, layer: int) -> UInt8[Tensor, "K pages bytes"]:
        """A layer's pages."""
        size = page_bytes(self.width, self.wide_keys[layer])
        layer_bytes = self.data[self._begin_of(layer) : self._begin_of(layer + 1)]
        return layer_bytes.view(self.kv_heads, self.capacity // PAGE, size)

    def scales(self, layer: int) -> Float[Tensor, "K pages 3 16"]:
        """Each token's scale of the key; base-2 logarithm of the scale of the value; inverse of
        that."""
        return self.pages(layer)[..., :SCALES].view(torch.float32).unflatten(-1, (3, PAGE))

    def like(self, capacity: int) -> Pages:
        """Others, of another capacity."""
        return Pages(self.kv_heads, self.width, capacity, self.wide_keys, self.copy_entries)

    def copy(
        self, source: Entries, into: Sequence[int], rows: Sequence[int] | Int[Tensor, "LK n"]
    ) -> None:
        """See `Entries.copy`.

        Raises:
            ValueError: slots that there are not, rows of another number, or a source of other
                types.
        """
        if not isinstance(source, Pages) or source.wide_keys != self.wide_keys:
            raise ValueError("entries are copied from a cache with other types of keys")
        heads = self.layers * self.kv_heads
        per_head = isinstance(rows, Tensor)
        to_slots = torch.tensor(into, dtype=torch.int32, device="cpu")
        from_slots = torch.as_tensor(rows, dtype=torch.int32, device="cpu").contiguous()
        count = len(to_slots)
        size = (heads, count) if per_head else (count,)
        if from_slots.shape != size:
            raise ValueError(
                f"rows have the shape {tuple(from_slots.shape)}; valid: one for each of {count} "
                "slots"
            )
        if not count:
            return
        check_slots(to_slots, self.capacity)
        check_slots(from_slots, source.capacity)
        wide = (ctypes.c_uint8 * self.layers)(*self.wide_keys)
        self.copy_entries(
            address("pages", self.data, PAGE_DTYPE, self._begin_of(self.layers)),
            self.capacity,
            address("pages of the source", source.data, PAGE_DTYPE, len(source.data)),
            source.capacity,
            self.width,
            self.layers,
            ctypes.addressof(wide),
            self.kv_heads,
            count,
            address("slots", to_slots, torch.int32, count),
            address("rows", from_slots, torch.int32, *from_slots.shape),
            int(per_head),
        )

    def copy_first(self, source: Entries, length: int) -> None:
        """Copy the first ``length`` entries, by whole pages."""
        if not isinstance(source, Pages):
            raise ValueError("entries are copied from a cache with other types of keys")
        count = -(-length // PAGE)
        for layer in range(self.layers):
            self.pages(layer)[:, :count] = source.pages(layer)[:, :count]

    def drop(self, count: int) -> None:
        """See `Entries.drop`."""
        first = count // PAGE
        for layer in range(self.layers):  # a copy of one at a time
            pages = self.pages(layer)
            pages[:, : pages.shape[1] - first] = pages[:, first:].clone()

    def keys(self, layers: slice, start: int, end: int) -> Float[Tensor, "L K n d"]:
        """Keys of slots as numbers, float32."""
        numbers = range(self.layers)[layers]
        return torch.stack([self._layer_keys(layer, start, end) for layer in numbers])

    def _layer_keys(self, layer: int, start: int, end: int) -> Float[Tensor, "K n d"]:
        first = start // PAGE
        last = -(-end // PAGE)
        words = self._key_words(layer)[:, first:last]  # (K, pages, words, 16, numbers of a word)
        integers = words.transpose(-3, -2).flatten(-2).float()
        if not self.wide_keys[layer]:
            integers -= 128
        scales = self.scales(layer)[:, first:last, 0]
        keys = (integers * scales[..., None]).flatten(1, 2)
        return keys[:, start - first * PAGE : end - first * PAGE]

    def _key_words(self, layer: int) -> Integer[Tensor, "K pages words 16 numbers"]:
        """The integers of a layer's keys, in words of 4 bytes; those of 8 bits have an offset of
        128."""
        wide = self.wide_keys[layer]
        size = self.width * PAGE * (2 if wide else 1)
        numbers = self.pages(layer)[..., SCALES : SCALES + size]
        if wide:
            return numbers.view(torch.int16).unflatten(-1, (-1, PAGE, 2))
        return numbers.unflatten(-1, (-1, PAGE, 4))

    def put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        """Write keys of slots from ``start`` on."""
        slots = torch.arange(start, start + keys.shape[2])
        page = slots // PAGE
        place = slots % PAGE
        for layer, layer_keys in enumerate(keys):
            wide = self.wide_keys[layer]
            levels = KEY_LEVELS if wide else 127
            scale = layer_keys.abs().amax(-1) / levels
            integers = (layer_keys / scale.clamp_min(1e-30)[..., None]).round()
            integers = integers.clamp(-levels, levels)
            if not wide:
                integers += 128
            self.scales(layer)[:, page, 0, place] = scale
            words = self._key_words(layer)
            per_word = integers.to(words.dtype).unflatten(-1, (-1, words.shape[-1]))
            # (n, K, words, numbers): indices that a slice stands between come first
            words[:, page, :, place] = per_word.permute(1, 0, 2, 3)

    def put_random(self, generator: torch.Generator) -> None:
        """Fill all slots with random keys and values, for checks and benchmarks."""
        for layer, wide in enumerate(self.wide_keys):
            pages = self.pages(layer)
            values = torch.randint(-127, 128, pages.shape, generator=generator)
            pages.copy_(values.to(torch.int8).view(PAGE_DTYPE))
            words = self._key_words(layer)
            levels = KEY_LEVELS if wide else 127
            keys = torch.randint(-levels, levels + 1, words.shape, generator=generator)
            words.copy_(keys if wide else keys + 128)
            scales = self.scales(layer)
            size = (2, *scales[..., 0, :].shape)
            key_scales, value_scales = 0.001 + 0.02 * torch.rand(size, generator=generator)
            if wide:
                key_scales *= 127 / KEY_LEVELS
            scales.copy_(torch.stack([key_scales, value_scales.log2(), 1 / value_scales], -2))


def check_slots(slots: Int[Tensor, "*n"], capacity: int) -> None:
    """Check that slots are within a cache.

    Raises:
        ValueError: naming the lowest and the highest.
    """
    first = int(slots.min())
    last = int(slots.max())
    if first < 0 or last >= capacity:
        raise ValueError(f"slots from {first} to {last}; valid: 0 to {capacity - 1}")
