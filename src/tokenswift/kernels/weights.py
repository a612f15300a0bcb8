"""A decoder's weights as backends read them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from tokenswift.kernels.formats import PANEL, STORED_IN, Format, Stored
from tokenswift.kv.memory import Arena, large_empty

#: greatest number of a layer's experts: a row's scores are kept on a thread's stack
MOST_EXPERTS = 1 << 14
#: writes a weight that is stored quantized into its panels, (P, bytes of a panel)
WritePanels: TypeAlias = Callable[[Stored, UInt8[Tensor, "P bytes"]], None]


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
        write_panels: writes what is stored quantized into panels, where K is even; None: the weight
            becomes a matrix.
        dtype: of the weight's values in products; by default that of the tensors, float32 without
            any. Tensors become so, but bfloat16 stays in panels for float32 products.
        arena: where panels go; by default memory of their own.

    Attributes:
        parts: the rows, in order; one without panels.
        c_parts: the parts as structures of the CPU kernels, which make them at the first product.
    Raises:
        ValueError: panels are asked for, and K is odd.
    """

    def __init__(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        write_panels: WritePanels | None = None,
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> None:
        weights = [weight] if isinstance(weight, Tensor | Stored) else weight
        weights = [each.detach() if isinstance(each, Tensor) else each for each in weights]
        self.rows = sum(len(each) for each in weights)
        self.columns: int = weights[0].shape[1]
        self.dtype = _value_type(weights) if dtype is None else dtype
        self.panels = write_panels is not None
        self.c_parts: object | None = None
        if write_panels is None:
            dense = [self._dense(each) for each in weights]
            matrix = torch.cat(dense) if len(dense) > 1 else dense[0]
            self.parts = [Part(matrix.contiguous(), self.rows)]
            return
        if self.columns % 2:
            raise ValueError(f"a weight has {self.columns} columns; valid: an even number")
        self.parts = [
            self._quantized_part(run, write_panels, arena)
            if isinstance(run, _StoredRun)
            else self._dense_part(run, arena)
            for run in self._runs(weights)
        ]

    def _dense(self, weight: Tensor | Stored) -> Tensor:
        if isinstance(weight, Stored):
            return weight.decode().to(self.dtype)
        stays = self.panels and weight.dtype == torch.bfloat16 and self.dtype == torch.float32
        return weight if stays else weight.to(self.dtype)

    def _runs(self, weights: Sequence[Tensor | Stored]) -> list[_StoredRun | list[Tensor]]:
        """Weights that follow each other in one format together; all unpacked where a format would
        end inside a panel."""
        runs: list[_StoredRun | list[Tensor]] = []
        for weight in weights:
            last = runs[-1] if runs else None
            if isinstance(weight, Stored) and self.dtype in STORED_IN:
                if isinstance(last, _StoredRun) and last.format is weight.format:
                    last.weights.append(weight)
                else:
                    runs.append(_StoredRun(weight.format, [weight]))
            elif isinstance(last, list):
                last.append(self._dense(weight))
            else:
                runs.append([self._dense(weight)])
        if any(_row_count(run) % PANEL for run in runs[:-1]):
            return [[self._dense(weight) for weight in weights]]
        return runs

    def _dense_part(self, run: list[Tensor], arena: Arena | None) -> Part:
        dtypes = {weight.dtype for weight in run}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.dtype
        data = _dense_panels([weight.to(dtype) for weight in run], arena)
        return Part(data, _row_count(run))

    def _quantized_part(
        self, run: _StoredRun, write_panels: WritePanels, arena: Arena | None
    ) -> Part:
        rows = _row_count(run)
        weights = run.weights
        if any(len(weight) % PANEL for weight in weights[:-1]):
            weights = [Stored(run.format, torch.cat([weight.blocks for weight in weights]))]
        panel_bytes = run.format.panel_bytes(self.columns)
        empty = large_empty if arena is None else arena.empty
        panels = empty(panel_count(rows), panel_bytes, dtype=torch.uint8)
        first = 0
        for weight in weights:
            write_panels(weight, panels[first : first + panel_count(len(weight))])
            first += len(weight) // PANEL
        return Part(panels, rows, run.format)

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

        Raises:
            ValueError: a part of the weight is in a quantized format.
        """
        if not self.panels:
            return self.data[ids]
        if any(part.format is not None for part in self.parts):
            raise ValueError(
                "rows are taken of a weight of which a part is quantized; valid: all or none of it"
            )
        numbers = ids.numpy()
        words = _words(self.data, self.data.shape[-1]).numpy()
        rows = torch.from_numpy(words[numbers // PANEL, :, numbers % PANEL, 0])
        return rows.view(self.data.dtype).to(self.dtype)

    def select(self, ids: Int[Tensor, " m"]) -> Packed:
        """Some rows of a weight of one quantized format in panels, with the same numbers.

        Raises:
            ValueError: the weight has several parts, or is in no quantized format.
        """
        form = self.parts[0].format
        if len(self.parts) != 1 or form is None:
            raise ValueError(
                f"rows are selected of a weight in {len(self.parts)} parts, quantized: "
                f"{self.stored}; valid: one part in a quantized format"
            )
        source = self.data
        target = large_empty(panel_count(len(ids)), source.shape[1], dtype=torch.uint8).zero_()
        blocks = self.columns // form.block
        old_rows = ids.numpy()
        new_rows = np.arange(len(ids))
        begin = 0
        for end, word in form.panel_sections():
            old = _section(source, blocks, begin, end, word)
            new = _section(target, blocks, begin, end, word)
            values = old[old_rows // PANEL, :, :, old_rows % PANEL]
            new[new_rows // PANEL, :, :, new_rows % PANEL] = values
            begin = end
        selected = copy.copy(self)
        selected.parts = [Part(target, len(ids), form)]
        selected.rows = len(ids)
        selected.c_parts = None
        return selected

    def unpack(self) -> Float[Tensor, "N K"]:
        """A weight without a quantized format as it was, of the type of products."""
        if not self.panels:
            return self.data
        rows = self.data.transpose(1, 2).reshape(-1, self.columns)[: self.rows]
        return rows.contiguous().to(self.dtype)


@dataclass(slots=True)
class _StoredRun:
    """Weights of one quantized format that follow each other."""

    format: Format
    weights: list[Stored]


def _row_count(run: _StoredRun | list[Tensor]) -> int:
    weights = run.weights if isinstance(run, _StoredRun) else run
    return sum(len(weight) for weight in weights)


def panel_count(rows: int) -> int:
    """Panels that hold so many rows."""
    return -(-rows // PANEL)


def _value_type(weights: Sequence[Tensor | Stored]) -> torch.dtype:
    """The type of the first tensor; float32 where all weights are stored quantized."""
    dtypes = (weight.dtype for weight in weights if isinstance(weight, Tensor))
    return next(dtypes, torch.float32)


def _dense_panels(weights: Sequence[Tensor], arena: Arena | None) -> Tensor:
    """The panels of weights that stand one below the other, all of one type."""
    dtype = weights[0].dtype
    pair = 2 if dtype == torch.bfloat16 else 1
    rows = sum(len(weight) for weight in weights)
    columns = weights[0].shape[1]
    empty = large_empty if arena is None else arena.empty
    data = empty(panel_count(rows), columns // pair, PANEL, pair, dtype=dtype)
    panels = _words(data, pair)[..., 0]
    if any(len(weight) % PANEL for weight in weights[:-1]):
        weights = [torch.cat(list(weights))]
    first = 0
    for weight in weights:
        full, remainder = divmod(len(weight), PANEL)
        words = _words(weight, pair)
        by_panel = words[: full * PANEL].unflatten(0, (full, PANEL))
        panels[first : first + full] = by_panel.transpose(1, 2)
        first += full
        if remainder:
            panels[first, :, remainder:] = 0
            panels[first, :, :remainder] = words[full * PANEL :].T
    return data


def _words(numbers: Tensor, pair: int) -> Tensor:
    """Two numbers of bfloat16 as one word; others as they are."""
    if pair == 1:
        return numbers
    numbers = numbers.contiguous()
    if numbers.storage_offset() % 2:  # no address of a word
        numbers = numbers.clone()
    return numbers.view(torch.int32)


def _section(
    panels: UInt8[Tensor, "P bytes"], blocks: int, begin: int, end: int, word: type[np.generic]
) -> np.ndarray:
    """Some bytes of each block of panels as words: (P, blocks, words a row, rows)."""
    by_block = panels.numpy().reshape(len(panels), blocks, -1)
    words = by_block[..., begin:end].view(word)
    return words.reshape(len(panels), blocks, -1, PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How rows go through experts, in place of one MLP.

    Attributes:
        experts: how many there are.
        used: how many of them a row goes through.
        inner: width of each.
        shared: width of the expert that all rows go through; 0: there is none.
        shared_gate: whether the router has one more row, whose logit's sigmoid the shared expert's
            output is multiplied with.
        sigmoid: whether a score is a logit's sigmoid, else the softmax over all experts.
        renormalised: whether the scores of a row's experts are divided by their sum.
    """

    experts: int
    used: int
    inner: int
    shared: int = 0
    shared_gate: bool = False
    sigmoid: bool = False
    renormalised: bool = False

    @property
    def router_rows(self) -> int:
        """Rows of the router's weight."""
        return self.experts + self.shared_gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes, types and switches of a decoder's layers.

    Attributes:
        layers, hidden, inner, heads, kv_heads, width: L, D, the MLP's width, H, K and d.
        mixture: of the layers with experts; None: no layer has any.
        weights, keys: types of weights as products take them, and of keys and values: float32,
            bfloat16 or float16; keys and values also int8.
        active: type of what enters a product: bfloat16 for bfloat16 weights, else float32; int8
            (groups of 32 integers with a scale) where all weights are stored quantized.
        eps: what norms add to the mean of squares.
        scale: what products of queries and keys are multiplied with.
        cap: attention scores become ``cap * tanh(score / cap)``; 0: they stay.
        residual: what attention and MLP add to a state is multiplied with it.
        gelu: whether the MLP's activation is GeLU by its tanh, else SiLU.
        norm_all_heads: whether norms of queries and keys are over all heads together.
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
    norm_all_heads: bool = False
    parallel: bool = False
    mixture: Mixture | None = None

    @property
    def queries(self) -> torch.dtype:
        """Type of queries: what is multiplied with the keys."""
        return active_type(self.keys)


def active_type(weights: torch.dtype) -> torch.dtype:
    """Type of what is multiplied with weights, or keys, of a type."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


@dataclass(slots=True)
class ExpertWeights:
    """The weights of a layer's experts.

    Attributes:
        router: (`Mixture.router_rows`, D), float32.
        gate_up, down: of each expert, as those of an MLP.
        bias: added to the scores by which experts are chosen, (E,).
        c_experts: the experts as structures of the CPU kernels, which make them once.
    """

    router: Packed
    gate_up: list[Packed]
    down: list[Packed]
    bias: Tensor | None = None
    c_experts: object | None = None

    def packed(self) -> list[Packed]:
        """The experts' weights, without the router."""
        return [*self.gate_up, *self.down]


@dataclass(slots=True)
class LayerWeights:
    """One layer: packed projections, and float32 vectors for everything else (None where there is
    none).

    Attributes:
        qkv: queries, keys and values in one, ((H + 2 K) d, D).
        out: (D, H d).
        gate_up: gate, then up, (2 · inner, D).
        down: (D, inner). Beside experts, both are those of the expert that all rows go through;
            None where there is none.
        norm, mlp_norm: weights of the RMS norms before attention and before the MLP; None where
            states enter as they are.
        out_norm, down_norm: weights of the norms of what attention and MLP add to a state.
        query_norm, key_norm: weights of the norms of each head's query and key, or of all heads'
            together.
        rope: which of the sets of angles rotates queries and keys; -1: none.
        window: newest keys that a token sees (itself included); 0 is all.
        wide_keys: whether keys, where a cache keeps whole numbers, are of 16 bits.
        second_qkv: of a drafter's layer: adds to queries, keys and values from a second input, of
            which a pass has a row for each of its states, ((H + 2 K) d, D).
        second_norm: weight of the norm of that input.
        experts: of a mixture; None: the layer has one MLP.
    """

    qkv: Packed
    out: Packed
    gate_up: Packed | None
    down: Packed | None
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
    second_qkv: Packed | None = None
    second_norm: Tensor | None = None
    experts: ExpertWeights | None = None

    def mlp(self) -> tuple[Packed, Packed]:
        """gate_up and down.

        Raises:
            ValueError: the layer has none, only experts.
        """
        if self.gate_up is None or self.down is None:
            raise ValueError("the layer has experts alone; valid: one with an MLP")
        return self.gate_up, self.down

    def packed(self) -> list[Packed]:
        """All weights that are multiplied with, but for a router."""
        optional = (self.gate_up, self.down, self.second_qkv)
        weights = [self.qkv, self.out, *(weight for weight in optional if weight is not None)]
        return weights if self.experts is None else [*weights, *self.experts.packed()]

    def tensors(self) -> Iterator[Tensor]:
        """Everything that passes read."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield value
        routers = [] if self.experts is None else [self.experts.router]
        for weight in (*self.packed(), *routers):
            yield from (part.data for part in weight.parts)
