"""Caches of keys and values in int8, in the pages that the compiled kernels read (cpu_int_attention.h).

A head's key or value of a token is a row of integers with one scale. Of each layer and KV head 16
tokens stand together in a page, so a cache's tensor is (layers, K, pages, bytes of a page). Half
the memory of bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kernels.cpu.structs import PAGE, SCALES, address, page_bytes
from tokenswift.kv.full import FullCache, large_empty
from tokenswift.kv.sparse import SparseCache


class Pages:
    """A cache's tensor, and what copies entries between such tensors.

    Args:
        layers, kv_heads, width: of the cache.
        capacity: tokens that fit, rounded up to pages.
        copy_entries: ``ts_copy`` of the compiled kernels.

    Attributes:
        data: (layers, K, pages, bytes of a page).
    """

    def __init__(self, layers: int, kv_heads: int, width: int, capacity: int, copy_entries: Any) -> None:
        self.width, self.copy_entries = width, copy_entries
        shape = (layers, kv_heads, -(-capacity // PAGE), page_bytes(width))
        self.data = large_empty(*shape, dtype=torch.uint8)

    def like(self, capacity: int) -> Pages:
        """Others, of another capacity."""
        layers, kv_heads = self.data.shape[:2]
        return Pages(layers, kv_heads, self.width, capacity, self.copy_entries)

    @property
    def scales(self) -> Float[Tensor, "L K pages 3 16"]:
        """Each token's scale of the key; base-2 logarithm of the scale of the value; inverse of that."""
        return self.data[..., :SCALES].view(torch.float32).unflatten(-1, (3, PAGE))

    def put_scales(self, keys: Float[Tensor, "L K pages 16"], values: Float[Tensor, "L K pages 16"]) -> None:
        """Write the scales of all keys and values."""
        self.scales.copy_(torch.stack([keys, values.log2(), 1 / values], -2))

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.data.shape[2] * PAGE

    def copy(self, source: Pages, into: Sequence[int], rows: Sequence[int] | Int[Tensor, "heads n"]) -> None:
        """Copy entries of all layers and heads to slots ``into``, one after the other.

        Args:
            source: where they are; may be this one.
            rows: their slots there, or those of each layer and head.
        """
        heads, own = self.data.shape[0] * self.data.shape[1], isinstance(rows, Tensor)
        to = torch.tensor(into, dtype=torch.int32, device="cpu")
        of = torch.as_tensor(rows, dtype=torch.int32, device="cpu").contiguous()
        count = len(to)
        if of.shape != ((heads, count) if own else (count,)):
            raise ValueError(f"rows have the shape {tuple(of.shape)}; valid: one for each of {count} slots")
        if not count:
            return
        for slots, room in ((to, self.capacity), (of, source.capacity)):
            if int(slots.min()) < 0 or int(slots.max()) >= room:
                raise ValueError(
                    f"slots from {int(slots.min())} to {int(slots.max())}; valid: 0 to {room - 1}"
                )
        like, size = self.data.shape[:2], page_bytes(self.width)
        self.copy_entries(
            address("pages", self.data, torch.uint8, *like, self.capacity // PAGE, size),
            self.capacity,
            address("pages of the source", source.data, torch.uint8, *like, source.capacity // PAGE, size),
            source.capacity,
            self.width,
            heads,
            count,
            address("slots", to, torch.int32, count),
            address("rows", of, torch.int32, *((heads, count) if own else (count,))),
            int(own),
        )

    def copy_first(self, source: Pages, length: int) -> None:
        """Copy the first ``length`` entries, by whole pages."""
        pages = -(-length // PAGE)
        self.data[:, :, :pages] = source.data[:, :, :pages]

    def keys(self, layers: slice, start: int, end: int) -> Float[Tensor, "L K n d"]:
        """Keys of slots as numbers, float32."""
        first, last = start // PAGE, -(-end // PAGE)
        pages = self.data[layers, :, first:last]
        scales = self.scales[layers, :, first:last, 0]
        words = pages[..., SCALES : SCALES + self.width * PAGE].unflatten(-1, (-1, PAGE, 4))
        whole = words.transpose(-3, -2).flatten(-2).float() - 128  # (L, K, pages, 16, d)
        found = (whole * scales[..., None]).flatten(2, 3)
        return found[:, :, start - first * PAGE : end - first * PAGE]

    def put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        """Write keys of slots from ``start`` on."""
        at = torch.arange(start, start + keys.shape[2])
        page, place = at // PAGE, at % PAGE
        scale = keys.abs().amax(-1) / 127
        whole = (keys / scale.clamp_min(1e-30)[..., None]).round().clamp(-127, 127) + 128
        self.scales[:, :, page, 0, place] = scale
        words = self.data[..., SCALES : SCALES + self.width * PAGE].unflatten(-1, (-1, PAGE, 4))
        # (n, L, K, words, 4): indices that a slice stands between come first
        words[:, :, page, :, place] = whole.to(torch.uint8).unflatten(-1, (-1, 4)).permute(2, 0, 1, 3, 4)


class IntFullCache(FullCache):
    """A `FullCache` in int8.

    Args:
        pages: room for its entries.
        length: of the entries that are there.
    """

    def __init__(self, pages: Pages, length: int = 0) -> None:
        self.pages, self.data = pages, pages.data
        self.work = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.layers, self.capacity = len(self.data), pages.capacity
        self._length = length

    def fill_random(self) -> None:
        """See `FullCache.fill_random`."""
        self.data.random_(1, 255)
        scales = torch.full_like(self.pages.scales[..., 0, :], 0.02)
        self.pages.put_scales(scales, scales)

    def _move_rows(self, start: int, nodes: Sequence[int]) -> None:
        self.pages.copy(self.pages, range(start, start + len(nodes)), [start + node for node in nodes])

    def _copy(self, capacity: int, length: int) -> FullCache:
        pages = self.pages.like(capacity)
        pages.copy_first(self.pages, length)
        return IntFullCache(pages, length)

    def keys(self, layer: int) -> Tensor:
        """Committed keys of a layer as numbers, (K, T, d) float32."""
        return self.pages.keys(slice(layer, layer + 1), 0, self._length)[0]


class IntSparseCache(SparseCache):
    """A `SparseCache` in int8, of a cache in int8."""

    def _make(self, like: FullCache, rows: int) -> None:
        if not isinstance(like, IntFullCache):
            raise TypeError(f"the full cache is a {type(like).__name__}; valid: IntFullCache")
        self.pages = like.pages.like(rows)
        self.data = self.pages.data
        self.data.zero_()  # scales that nobody wrote are numbers, too

    def _copy(self, source: FullCache | SparseCache, into: list[int], rows: list[int]) -> None:
        self.pages.copy(source.pages, into, rows)  # type: ignore[union-attr]

    def _copy_chosen(self, full: FullCache, chosen: list[Int[Tensor, "K n"]]) -> None:
        self.pages.copy(full.pages, range(chosen[0].shape[1]), torch.cat(chosen))  # type: ignore[attr-defined]

    def _keys(self, start: int, end: int) -> Float[Tensor, "L K n d"]:
        return self.pages.keys(slice(None), start, end)

    def _put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        self.pages.put_keys(start, keys)
