"""A decoder's weights as backends read them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kernels.formats import PANEL, STORED_IN, Format, Stored
from tokenswift.kv.memory import Arena, large_empty


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a packed weight, which have one format.

    Attributes:
        data: their numbers, in panels or as a matrix.
        rows: how many.
        format: quantized format; None: numbers of the tensor's own type.
    """

    data: Tensor
    rows: int
    format: Format | None = None


class Packed:
    """A linear layer's weight (N, K): a matrix, or panels of :data:`PANEL` of its rows for the CPU
    kernels.

    Inside a panel the numbers stand in the order in which a product reads them: (K, 32) for float32
    and float16, (K / 2, 32, 2) for bfloat16, as cpu_low.h says for quantized formats. Rows beyond N
    are 0.

    Args:
        weight: (N, K), or several weights that stand one below the other in it. A matrix of one
            tensor shares its memory. What is stored quantized stays so in panels for products in
            float32 and bfloat16.
        fill: writes what is stored quantized into panels, where K is even; None: no panels.
        dtype: of the weight's values in products; by default that of the tensors, float32 without
            any. Tensors become so, but bfloat16 stays in panels for float32 products.
        arena: where panels go; by default memory of their own.

    Attributes:
        parts: the rows, in order; one without panels.
        native: what the kernels keep beside it.
    """

    def __init__(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        fill: Callable[[Stored, Tensor], None] | None = None,
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> None:
        given = [weight] if isinstance(weight, Tensor | Stored) else weight
        parts = [part.detach() if isinstance(part, Tensor) else part for part in given]
        self.rows, self.columns = sum(map(len, parts)), parts[0].shape[1]
        own = next((part.dtype for part in parts if isinstance(part, Tensor)), torch.float32)
        self.dtype, self.panels = dtype or own, fill is not None
        self.native: Any = None
        if fill is None:
            dense = [self._dense(part) for part in parts]
            self.parts = [
                Part((torch.cat(dense) if len(dense) > 1 else dense[0]).contiguous(), self.rows)
            ]
            return
        if self.columns % 2:
            raise ValueError(f"a weight has {self.columns} columns; valid: an even number")
        stays = self.dtype in STORED_IN
        runs = _runs([p if stays and isinstance(p, Stored) else self._dense(p) for p in parts])
        if any(
            sum(map(len, run)) % PANEL for run in runs[:-1]
        ):  # a format would end inside a panel
            runs = _runs([self._dense(part) for part in parts])
        room = large_empty if arena is None else arena.empty
        self.parts = [self._part(run, fill, room) for run in runs]

    def _dense(self, part: Tensor | Stored) -> Tensor:
        if isinstance(part, Stored):
            return part.decode().to(self.dtype)
        wide = self.panels and part.dtype == torch.bfloat16 and self.dtype == torch.float32
        return part if wide else part.to(self.dtype)

    def _part(
        self, run: list[Any], fill: Callable[[Stored, Tensor], None], room: Callable[..., Tensor]
    ) -> Part:
        rows, form = sum(map(len, run)), getattr(run[0], "format", None)
        if form is None:
            kept = run[0].dtype if all(part.dtype == run[0].dtype for part in run) else self.dtype
            return Part(_panels([part.to(kept) for part in run], rows, room), rows)
        data, at = room(-(-rows // PANEL), form.panel_bytes(self.columns), dtype=torch.uint8), 0
        if any(len(part) % PANEL for part in run[:-1]):
            run = [Stored(form, torch.cat([part.blocks for part in run]))]
        for part in run:
            fill(part, data[at : at + -(-len(part) // PANEL)])
            at += len(part) // PANEL
        return Part(data, rows, form)

    @property
    def data(self) -> Tensor:
        """The numbers of the first part, mostly the only one."""
        return self.parts[0].data

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes."""
        return sum(part.data.nbytes for part in self.parts)

    @property
    def stored(self) -> bool:
        """Whether all of it is in quantized formats."""
        return all(part.format is not None for part in self.parts)

    def take(self, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """Some rows of a weight without a quantized format; see `Backend.take`.

        Panels are indexed by numpy: torch would start its threads for it, which then spin beside
            ours.
        """
        if not self.panels:
            return self.data[ids]
        if any(part.format is not None for part in self.parts):
            raise ValueError(
                "rows are taken of a weight of which a part is quantized; valid: all or none of it"
            )
        at, words = ids.numpy(), _words(self.data, self.data.shape[-1]).numpy()
        rows = torch.from_numpy(words[at // PANEL, :, at % PANEL, 0])
        return rows.view(self.data.dtype).to(self.dtype)

    def select(self, ids: Int[Tensor, " m"]) -> Packed:
        """Some rows of a weight of one quantized format in panels, with the same numbers."""
        (part,), at, to = self.parts, ids.numpy(), np.arange(len(ids))
        form: Any = part.format
        data = large_empty(-(-len(at) // PANEL), part.data.shape[1], dtype=torch.uint8).zero_()
        old, new = (
            x.numpy().reshape(len(x), self.columns // form.block, -1) for x in (part.data, data)
        )
        scales, start = PANEL * (2 if form.offset else 4), 0
        for end, kind in (
            (scales, np.uint16),
            (form.head_bytes(), np.uint8),
            (old.shape[2], np.uint32),
        ):
            source, made = (
                x[..., start:end].view(kind).reshape(*x.shape[:2], -1, PANEL) for x in (old, new)
            )
            made[to // PANEL, :, :, to % PANEL] = source[at // PANEL, :, :, at % PANEL]
            start = end
        chosen = copy.copy(self)
        chosen.parts, chosen.rows, chosen.native = [Part(data, len(at), form)], len(at), None
        return chosen

    def unpack(self) -> Float[Tensor, "N K"]:
        """A weight without a quantized format as it was, of the type of products."""
        if not self.panels:
            return self.data
        return (
            self.data.transpose(1, 2)
            .reshape(-1, self.columns)[: self.rows]
            .contiguous()
            .to(self.dtype)
        )


def _runs(parts: Sequence[Tensor | Stored]) -> list[Any]:
    """Neighbours of one format together."""
    return [list(run) for _, run in groupby(parts, lambda part: getattr(part, "format", None))]


def _panels(parts: Sequence[Tensor], rows: int, room: Callable[..., Tensor]) -> Tensor:
    """The panels of weights that stand one below the other."""
    pairs, at = 2 if parts[0].dtype == torch.bfloat16 else 1, 0
    made = room(-(-rows // PANEL), parts[0].shape[1] // pairs, PANEL, pairs, dtype=parts[0].dtype)
    panels = _words(made, pairs)[..., 0]
    if any(len(part) % PANEL for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    for part in parts:
        whole, rest = divmod(len(part), PANEL)
        words = _words(part, pairs)
        panels[at : at + whole] = (
            words[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
        )
        at += whole
        if rest:
            panels[at, :, rest:] = 0
            panels[at, :, :rest] = words[whole * PANEL :].T
    return made


def _words(numbers: Tensor, pairs: int) -> Tensor:
    """Two numbers of bfloat16 as one word; others as they are."""
    if pairs == 1:
        return numbers
    numbers = numbers.contiguous()
    return (numbers.clone() if numbers.storage_offset() % 2 else numbers).view(torch.int32)


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that describe a decoder's layers.

    Attributes:
        layers, hidden, inner, heads, kv_heads, width: L, D, the MLP's width, H, K and d.
        weights, keys: types of weights as products take them, and of keys and values: float32,
            bfloat16 or float16.
        active: type of what enters a product: bfloat16 for bfloat16 weights, else float32; int8
            (groups of 32 integers with a scale) where all weights are stored quantized.
        eps: of the norms.
        scale: of attention scores.
        cap: of attention scores, ``cap * tanh(score / cap)``; 0: none.
        residual: what attention and MLP add to a state is multiplied with.
        gelu: whether the MLP's activation is GeLU by its tanh, else SiLU.
        whole_norms: whether norms of queries and keys are over all heads together.
        parallel: whether attention and MLP take in the same norm, of states without their mean.
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
    cap: float = 0.0
    residual: float = 1.0
    gelu: bool = False
    whole_norms: bool = False
    parallel: bool = False

    @property
    def queries(self) -> torch.dtype:
        """Type of queries: what is multiplied with the keys."""
        return active_type(self.keys)


def active_type(weights: torch.dtype) -> torch.dtype:
    """Type of what is multiplied with weights, or keys, of a type."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


#: the weights of a layer that are multiplied with, in the order of the kernels
PRODUCTS = ("qkv", "out", "gate_up", "down")


@dataclass(slots=True)
class LayerWeights:
    """One layer: packed projections, and float32 vectors for everything else (None where there is
    none).

    Attributes:
        qkv: queries, keys and values in one, ((H + 2 K) d, D).
        out: (D, H d).
        gate_up: gate, then up, (2 · inner, D).
        down: (D, inner).
        norm, mlp_norm: weights of the RMS norms before attention and before the MLP; None where
            states enter as they are.
        out_norm, down_norm: of the norms of what attention and MLP add to a state.
        query_norm, key_norm: of the norms of each head's query and key, or of all heads' together.
        rope: which of the sets of angles turns queries and keys; -1: none.
        window: newest keys that a token sees (itself included); 0 is all.
        wide_keys: whether keys, where a cache keeps whole numbers, are of 16 bits.
        beside: of a drafter's layer: what is added to queries, keys and values from a second input,
            of which a pass has a row beside each of its states, ((H + 2 K) d, D).
        beside_norm: of the norm of that input.
    """

    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    norm: Tensor | None
    mlp_norm: Tensor | None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    out_norm: Tensor | None = None
    down_norm: Tensor | None = None
    rope: int = 0
    window: int = 0
    wide_keys: bool = False
    beside: Packed | None = None
    beside_norm: Tensor | None = None

    def packed(self) -> list[Packed]:
        """Those of :data:`PRODUCTS`, and what is beside them."""
        return [getattr(self, name) for name in PRODUCTS] + (
            [] if self.beside is None else [self.beside]
        )

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a pass reads."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Packed):
                yield from (part.data for part in value.parts)
            elif isinstance(value, Tensor):
                yield value
