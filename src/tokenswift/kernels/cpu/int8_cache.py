"""Keys and values of a cache in int8, in the pages that the compiled kernels read (cpu_int_attention.h).

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
from tokenswift.kv.full import Entries, large_empty


class Pages(Entries):
    """A cache's tensor, and what copies entries between such tensors.

    Args:
        layers, kv_heads, width: of the cache.
        capacity: tokens that fit, rounded up to pages.
        copy_entries: ``ts_copy`` of the compiled kernels.

    Attributes:
        data: (layers, K, pages, bytes of a page).
    """

    def __init__(self, layers: int, kv_heads: int, width: int, capacity: int, copy_entries: Any) -> None:
        shape = (layers, kv_heads, -(-capacity // PAGE), page_bytes(width))
        self.layers, self.capacity = layers, shape[2] * PAGE
        self.width, self.copy_entries = width, copy_entries
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

    def copy(self, source: Any, into: Sequence[int], rows: Sequence[int] | Int[Tensor, "LK n"]) -> None:
        """See `Entries.copy`.

        Raises:
            ValueError: slots that there are not, or rows of another number.
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

    def fill_random(self) -> None:
        """See `Entries.fill_random`."""
        self.data.random_(1, 255)
        scales = torch.full_like(self.scales[..., 0, :], 0.02)
        self.put_scales(scales, scales)
