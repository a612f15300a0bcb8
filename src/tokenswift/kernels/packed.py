"""A linear layer's weight as products read it: a matrix, or panels of its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from tokenswift.kernels.formats import PANEL, STORED_IN, Format, Stored
from tokenswift.kv.memory import Arena, large_empty

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
