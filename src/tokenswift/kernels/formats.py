"""Quantized formats: blocks of integers with scales.

All formats are one arithmetic. A weight is ``scale · u + least``: ``u`` is an integer without sign
of a few bits, or what a table says for it; ``scale`` and ``least`` belong to a group of neighbours
in a row. Scale times number has at most 24 bits, so the product is exact in float32 and a fused
multiply-add gives the very value of the unpacked checkpoint. The gguf package makes and unpacks
blocks; `ts_pack` of the CPU kernels takes them apart for products (cpu_pack.h).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

PANEL = 32  # rows of a weight side by side in a panel of the CPU kernels; NR of cpu_tile.h
#: weights that are unpacked together, so that what stands between two steps stays in the caches
WEIGHTS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Format:
    """A number format.

    Attributes:
        name: as users write it.
        code: its number in GGUF's list of types.
        block, nbytes: weights of a block, and the bytes that it takes.
        bits: bits of an integer in panels.
        group: weights that share a scale: a block, or a part of it.
        offset: what is subtracted from each integer; 0 where a least value is added.
        written: whether weights can be quantized to it.
    """

    name: str
    code: int
    block: int
    nbytes: int
    bits: int
    group: int = 32
    offset: int = 0
    written: bool = False

    def encode(self, rows: Float[Tensor, "N K"]) -> UInt8[Tensor, "N R"]:
        """Float32 rows, K a multiple of the block, quantized as llama.cpp does; of `written`
        formats."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.code)
        values = rows.detach().cpu().float().contiguous().numpy()
        blocks = np.empty((len(rows), self.row_bytes(rows.shape[1])), np.uint8)

        def quantize(part: slice) -> None:
            with np.errstate(all="ignore"):  # numbers too small for a scale become 0
                blocks[part] = gguf.quantize(values[part], kind)

        _by_parts(quantize, rows=rows.shape[0], columns=rows.shape[1])
        return torch.from_numpy(blocks)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of K weights.

        Raises:
            ValueError: K is no multiple of the block.
        """
        if columns % self.block:
            raise ValueError(
                f"a {self.name} weight has {columns} columns; valid: a multiple of {self.block}"
            )
        return columns // self.block * self.nbytes

    def head_bytes(self) -> int:
        """Bytes of the scales of a panel's block (cpu_low.h)."""
        groups = self.block // self.group
        of_groups = groups if groups > 1 else 0
        kinds = 1 if self.offset else 2  # scales alone, or with least values
        return kinds * (2 + of_groups) * PANEL

    def panel_bytes(self, columns: int) -> int:
        """Bytes of a panel of :data:`PANEL` rows of K weights, K a multiple of the block
        (cpu_low.h)."""
        return columns // self.block * (self.head_bytes() + self.block * self.bits * PANEL // 8)

    def panel_sections(self) -> tuple[tuple[int, type[np.generic]], ...]:
        """The sections of a panel's block: the byte at which each ends, and the words that it
        consists of, those of one row :data:`PANEL` apart (cpu_low.h)."""
        block_scales = PANEL * (2 if self.offset else 4)
        block_bytes = self.panel_bytes(self.block)
        return (
            (block_scales, np.uint16),
            (self.head_bytes(), np.uint8),
            (block_bytes, np.uint32),
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight (N, K) as a file holds it.

    Attributes:
        format: the format of its blocks.
        blocks: (N, bytes of a row).
    """

    format: Format
    blocks: UInt8[Tensor, "N R"]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self.blocks), self.blocks.shape[1] // self.format.nbytes * self.format.block

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, rows: Int[Tensor, " m"]) -> Stored:
        """Some rows."""
        return Stored(self.format, self.blocks[rows])

    def at(self, places: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Single weights, float32; places count along rows, then columns."""
        columns = self.shape[1]
        rows, row_of_place = (places // columns).unique(return_inverse=True)
        return self.take(rows).decode()[row_of_place, places % columns]

    def decode(self) -> Float[Tensor, "N K"]:
        """The weight in float32, on the CPU: what every kernel computes with."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.format.code)
        values = np.empty(self.shape, np.float32)
        blocks = self.blocks.cpu().contiguous().numpy()

        def unpack(part: slice) -> None:
            with np.errstate(all="ignore"):  # scales of a stranger's file may be no numbers
                decoded = gguf.dequantize(blocks[part], kind)
                np.add(decoded, 0.0, out=values[part])  # -0.0 becomes 0.0

        _by_parts(unpack, rows=self.shape[0], columns=self.shape[1])
        return torch.from_numpy(values)


def _by_parts(work: Callable[[slice], None], rows: int, columns: int) -> None:
    """Work on some rows at a time, on torch's number of threads."""
    count = max(1, WEIGHTS_AT_ONCE // max(columns, 1))
    parts = [slice(start, start + count) for start in range(0, rows, count)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(work, parts))


Q4_0 = Format("q4_0", 2, 32, 18, 4, offset=8, written=True)
Q4_1 = Format("q4_1", 3, 32, 20, 4, written=True)
MXFP4 = Format("mxfp4", 39, 32, 17, 4, offset=128)
Q8_0 = Format("q8_0", 8, 32, 34, 8, offset=128, written=True)
#: a file that has several is called by the first of them here; users may quantize to `written` ones
FORMATS = {
    form.name: form
    for form in (
        MXFP4,
        Q8_0,
        Format("q6_k", 14, 256, 210, 6, group=16, offset=32),
        Format("q5_k", 13, 256, 176, 5),
        Format("q5_1", 7, 32, 24, 5),
        Format("q5_0", 6, 32, 22, 5, offset=16),
        Format("q4_k", 12, 256, 144, 4),
        Q4_1,
        Q4_0,
        Format("iq4_nl", 20, 32, 18, 4, offset=128),
        Format("iq4_xs", 23, 256, 136, 4, offset=128),
        Format("q3_k", 11, 256, 110, 4, group=16, offset=4),
        Format("q2_k", 10, 256, 84, 4, group=16),
    )
}
BY_CODE = {form.code: form for form in FORMATS.values()}

#: types of products in which quantized weights stay as they are
STORED_IN = (torch.float32, torch.bfloat16)
