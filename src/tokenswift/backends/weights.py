"""A decoder's weights as backends read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.backends.pages import large_empty

PANEL = 32  # rows of a weight side by side; NR of cpu_tile.h


class Packed:
    """A linear layer's weight (N, K), cut into panels of :data:`PANEL` of its rows for the CPU kernels.

    Inside a panel the numbers stand in the order in which a product reads them: (K, 32) for float32 and
    float16, (K / 2, 32, 2) for bfloat16. Rows beyond N are 0. Without ``panels`` the matrix stays as it is,
    for the torch path.

    Args:
        weight: (N, K), K even, or several weights that stand one below the other in it; shared when it is one
            and not packed, else copied.
        panels: whether to pack.
    """

    def __init__(self, weight: Float[Tensor, "N K"] | Sequence[Tensor], panels: bool) -> None:
        parts = [part.detach() for part in ([weight] if isinstance(weight, Tensor) else weight)]
        self.rows, self.columns = sum(map(len, parts)), parts[0].shape[1]
        self.panels = panels
        self.dtype = parts[0].dtype
        if panels:
            if self.columns % 2:
                raise ValueError(f"a weight has {self.columns} columns; valid: an even number")
            self.data = _panels(parts, self.rows)
        else:
            self.data = (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes."""
        return self.data.numel() * self.data.element_size()

    def take(self, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """Some rows of the weight.

        Panels are indexed by numpy: torch would start its threads for it, which then spin beside ours.
        """
        if not self.panels:
            return self.data[ids]
        at = ids.numpy()
        rows = _numbers(self.data, self.data.shape[-1])[at // PANEL, :, at % PANEL, 0]
        return torch.from_numpy(rows).view(self.dtype)

    def unpack(self) -> Float[Tensor, "N K"]:
        """The weight as it was."""
        if not self.panels:
            return self.data
        return self.data.transpose(1, 2).reshape(-1, self.columns)[: self.rows].contiguous()


def _panels(parts: Sequence[Tensor], rows: int) -> Tensor:
    """The panels of weights that stand one below the other; nothing is copied twice."""
    pairs = 2 if parts[0].dtype == torch.bfloat16 else 1
    made = large_empty(-(-rows // PANEL), parts[0].shape[1] // pairs, PANEL, pairs, dtype=parts[0].dtype)
    panels, at = _numbers(made, pairs)[..., 0], 0
    for part in parts:
        given = _numbers(part.unflatten(1, (-1, pairs)), pairs)[..., 0]
        while len(given):
            panel, row = divmod(at, PANEL)
            if row or len(given) < PANEL:  # a part of a panel
                taken = min(PANEL - row, len(given))
                panels[panel, :, row : row + taken] = given[:taken].T
            else:
                whole, taken = len(given) // PANEL, len(given) // PANEL * PANEL
                blocks = given[:taken].reshape(whole, PANEL, -1)
                panels[panel : panel + whole] = blocks.transpose(0, 2, 1)
            given, at = given[taken:], at + taken
    if rows % PANEL:
        panels[-1, :, rows % PANEL :] = 0
    return made


def _numbers(pairs: Tensor, count: int) -> Any:
    """A tensor whose last dimension is what stays together, 1 or 2 numbers, as numpy takes it (…, 1)."""
    pairs = pairs.contiguous()
    if count == 1:
        return pairs.numpy()
    return (pairs if pairs.storage_offset() % 2 == 0 else pairs.clone()).view(torch.int32).numpy()


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that describe a decoder's layers.

    Attributes:
        layers, hidden, inner, heads, kv_heads, width: L, D, the MLP's width, H, K and d.
        weights, keys: types of weights, and of keys and values: float32, bfloat16 or float16.
        active: type of what enters a product: bfloat16 for bfloat16 weights, else float32.
        eps: of the norms.
        scale: of attention scores.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    weights: torch.dtype
    keys: torch.dtype
    active: torch.dtype
    eps: float
    scale: float

    @property
    def queries(self) -> torch.dtype:
        """Type of queries: what is multiplied with the keys."""
        return active_type(self.keys)


def active_type(weights: torch.dtype) -> torch.dtype:
    """Type of what is multiplied with weights, or keys, of a type."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


@dataclass(slots=True)
class LayerWeights:
    """One layer: packed projections, and float32 vectors for everything else (None where there is none).

    Attributes:
        qkv: queries, keys and values in one, ((H + 2 K) d, D).
        out: (D, H d).
        gate_up: gate, then up, (2 · inner, D).
        down: (D, inner).
        norm, mlp_norm: weights of the RMS norms before attention and before the MLP.
        query_norm, key_norm: of the norms of each head's query and key (Qwen3).
        window: newest keys that a token sees (itself included); 0 is all.
    """

    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    norm: Tensor
    mlp_norm: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    window: int = 0

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a pass reads."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Packed):
                yield value.data
            elif isinstance(value, Tensor):
                yield value
