"""Caches of keys and values in int8 as the card's kernels read them (`int_kernels`).

Of each layer and KV head a token has one entry: the integers of its key, those of its value, and float32
scales behind them, filled up to 16 bytes: the key's scale, the logarithm to base 2 of the value's, and the
inverse of the value's. So entries are copied, moved and gathered as a whole, and a pass reads each byte once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int8, Num
from torch import Tensor

from tokenswift.kv.full import FullCache, Move
from tokenswift.kv.pages import large_empty
from tokenswift.kv.sparse import SparseCache

SCALES = 16  # bytes of an entry behind its numbers
KEY, LEVEL, INVERSE = range(3)  # of the float32 numbers there
WIDEST = 256  # of a head whose chunk the kernels hold


def entry_bytes(width: int) -> int:
    """Bytes of a token's key and value of one head."""
    return 2 * width + SCALES


def width_of(data: Num[Tensor, "P K c e"]) -> int:
    """The width of the heads that a cache's tensor holds."""
    return (data.shape[3] - SCALES) // 2 if data.dtype == torch.int8 else data.shape[3]


def scales_of(data: Int8[Tensor, "*any e"]) -> Float[Tensor, "*any 4"]:
    """The scales of entries, where they stand."""
    return data.view(torch.float32)[..., -SCALES // 4 :]


class IntFullCache(FullCache):
    """A `FullCache` in int8, whose tensor is (layers, K, capacity, 2 d + 16).

    Args:
        layers, kv_heads, head_dim, capacity, device, move: see `FullCache`.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        device: torch.device,
        move: Move | None = None,
    ) -> None:
        super().__init__(0, kv_heads, head_dim, 0, torch.int8, device, move)
        shape = (layers, kv_heads, capacity, entry_bytes(head_dim))
        self.data = large_empty(*shape, dtype=torch.int8, device=device)
        self.layers, self.capacity = layers, capacity

    def fill_random(self) -> None:
        """See `FullCache.fill_random`."""
        self.data.random_(-127, 128)
        scales = scales_of(self.data)
        scales[..., KEY] = 0.02
        scales[..., LEVEL] = scales[..., KEY].log2()
        scales[..., INVERSE] = 1 / scales[..., KEY]

    def _copy(self, capacity: int, length: int) -> FullCache:
        layers, kv_heads = self.data.shape[:2]
        width, device = width_of(self.data), self.data.device
        made = IntFullCache(layers, kv_heads, width, capacity, device, self._move)
        made.data[:, :, :length] = self.data[:, :, :length]
        made._length = length
        return made

    def keys(self, layer: int) -> Tensor:
        """Committed keys of a layer as numbers, (K, T, d) float32."""
        return _keys(self.data[layer, :, : self._length])


class IntSparseCache(SparseCache):
    """A `SparseCache` in int8, of a cache in int8."""

    def _make(self, like: FullCache, rows: int) -> None:
        layers, kv_heads, _, size = like.data.shape
        # scales that nobody wrote are numbers, too
        self.data = torch.zeros(layers, kv_heads, rows, size, dtype=torch.int8, device=like.data.device)

    def _copy_chosen(self, full: FullCache, chosen: list[Int[Tensor, "K n"]]) -> None:
        heads = torch.arange(full.data.shape[1], device=self.data.device)[:, None]
        for layer, places in enumerate(chosen):
            self.data[layer, :, : places.shape[1]] = full.data[layer][heads, places]

    def _keys(self, start: int, end: int) -> Float[Tensor, "L K n d"]:
        return _keys(self.data[:, :, start:end])

    def _put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        scale = keys.abs().amax(-1) / 127
        whole = (keys / scale.clamp_min(1e-30)[..., None]).round().clamp(-127, 127)
        at = slice(start, start + keys.shape[2])
        self.data[:, :, at, : keys.shape[3]] = whole.to(torch.int8)
        scales_of(self.data)[:, :, at, KEY] = scale


def _keys(data: Int8[Tensor, "*any e"]) -> Float[Tensor, "*any d"]:
    """Keys of entries as numbers."""
    width = (data.shape[-1] - SCALES) // 2
    scales = data[..., 2 * width :].contiguous().view(torch.float32)
    return data[..., :width].float() * scales[..., KEY, None]
