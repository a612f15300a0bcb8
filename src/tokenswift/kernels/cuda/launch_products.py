"""Starts the Triton kernels of products; and how all kernels are started.

A product's inner dimension is cut into parts of :attr:`Tuning.split` numbers, so their count is a matter of
the weight alone. Where its blocks of columns and rows would not fill a card, each part is a program, and who
reads the sums adds them up; otherwise one program makes all of them. Both are the same sums.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.cuda import product_kernels
from tokenswift.kernels.cuda.weights import Planes

ROWS, INNER = 64, 64  # of a program's block of a product, and of a step along its inner dimension
WIDE = 128  # rows and columns of a block in passes of more than ROWS
FEW = 16  # rows of a program's part of a product with a quantized weight
GROUPS = 16  # of activations that a program makes integers of
FULL = 256  # blocks of a product that fill a card
LEAST_ROOM = 99 << 10  # bytes of shared memory that a program may have on the cards that have least
COMPILERS = 8  # threads that compile kernels


@dataclass(frozen=True, slots=True)
class Tuning:
    """How kernels are started: of few choices, each the same for all passes of a process.

    Attributes:
        attend_warps, attend_stages: of attention's chunks; the stages where there is room, and warps 0: what
            the card's registers hold without spilling.
        columns, warps, stages: of a block of a dense product.
        low_columns, low_warps, low_stages: of one with a quantized weight.
        low_step: pairs of groups of 32 that are fetched together there; it divides a part.
        split: numbers of a part of the inner dimension, a multiple of 64. Bits depend on it.
    """

    attend_warps: int = 0
    attend_stages: int = 3
    columns: int = 64
    warps: int = 4
    stages: int = 3
    low_columns: int = 64
    low_warps: int = 4
    low_stages: int = 3
    low_step: int = 2
    split: int = 1024


class ProductKernels:
    """Products, and the start of kernels.

    Args:
        device: a CUDA device; None for the interpreter.
        tuning: how kernels are started.

    Attributes:
        wide: whether blocks of passes of many rows are larger.
        split: the tuning's, of the kernels that are started from now on.
    """

    def __init__(self, device: torch.device | None = None, tuning: Tuning = Tuning()) -> None:  # noqa: B008
        self._device, self.tuning, self.wide, self.split = device, tuning, True, tuning.split
        self._compiling = False

    def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
        """Start a kernel. Products and sums stay apart: a compiler may not choose what is rounded once."""
        how = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
        with nullcontext() if self._device is None else torch.cuda.device(self._device):
            if self._compiling:
                kernel.warmup(grid=grid, **given, **how)
            else:
                kernel[grid](**given, **how)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Kernels that are started meanwhile are compiled, several at a time, and do not run."""
        from triton.runtime import _async_compile

        with ThreadPoolExecutor(COMPILERS) as threads, _async_compile.AsyncCompileMode(threads):
            self._compiling = True
            try:
                yield
            finally:
                self._compiling = False

    def room(self) -> int:
        """Bytes of shared memory that a program may have."""
        if self._device is None:
            return LEAST_ROOM
        found = torch.cuda.get_device_properties(self._device)
        return getattr(found, "shared_memory_per_block_optin", LEAST_ROOM)

    def generation(self) -> int:
        """The first number of the card's capability."""
        return 9 if self._device is None else torch.cuda.get_device_capability(self._device)[0]

    def warps(self, padded: int, itemsize: int) -> int:
        """Warps of attention for heads of such a width. On Hopper four, which wait for none of each other's
        scores and leave room for a second program; elsewhere four spill (docs/LOG.md)."""
        few = padded <= 64 or (self.generation() == 9 and itemsize == 2)
        return self.tuning.attend_warps or (4 if few else 8)

    def stages(self, padded: int, itemsize: int) -> int:
        """Tiles of keys and values that attention has on their way, for heads of such a width: as many as
        there is room for, up to those asked for. No bits depend on it."""
        tile = 2 * 64 * padded * itemsize
        return max(1, min(self.tuning.attend_stages, (self.room() - tile // 2) // tile))

    def parts(self, inner: int, blocks: tuple[int, int]) -> int:
        """Programs of a block of a product along its inner dimension: 1 where blocks fill a card, or one a
        part."""
        return 1 if blocks[0] * blocks[1] >= FULL else -(-inner // self.split)

    def product(
        self,
        states: Float[Tensor, "n K"],
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, " N"] | None,
        fold: bool = True,
    ) -> Float[Tensor, "p n N"]:
        """See :meth:`reference.Reference.product`."""
        (rows, inner), columns = states.shape, len(weight)
        tuning = self.tuning
        wide = rows > ROWS and self.wide
        of, width, warps = (WIDE, WIDE, 8) if wide else (ROWS, tuning.columns, tuning.warps)
        blocks = -(-columns // width), -(-rows // of)
        parts = 1 if fold or rows > ROWS else self.parts(inner, blocks)
        out = states.new_empty(parts, rows, columns, dtype=torch.float32)
        self.run(
            product_kernels.product,
            (*blocks, parts),
            warps,
            tuning.stages,
            states=states,
            weight=weight,
            bias=out if bias is None else bias,
            out=out,
            rows=rows,
            N=columns,
            K=inner,
            M=of,
            COLUMNS=width,
            INNER=INNER,
            SPLIT=self.split,
            FOLD=parts == 1,
            BIAS=bias is not None,
        )
        return out

    def low_product(
        self,
        states: Float[Tensor, "n K"],
        planes: Planes,
        bias: Float[Tensor, " N"] | None,
        whole: bool,
        fold: bool = True,
    ) -> Float[Tensor, "p n N"]:
        """See :meth:`reference.Reference.low_product`."""
        (rows, inner), (columns, groups) = states.shape, planes.scales.shape
        tuning = self.tuning
        blocks = -(-columns // tuning.low_columns), -(-rows // FEW)
        parts = 1 if fold or rows > ROWS else self.parts(32 * groups, blocks)
        out = states.new_empty(parts, rows, columns, dtype=torch.float32)
        taken, scales, sums = states, out, out
        if whole:
            taken = states.new_empty(rows, 32 * groups, dtype=torch.int8)
            scales, sums = (states.new_empty(rows, groups, dtype=torch.float32) for _ in range(2))
            self.run(
                product_kernels.to_whole,
                (rows, -(-groups // GROUPS)),
                4,
                1,
                states=states,
                numbers=taken,
                scales=scales,
                sums=sums,
                K=inner,
                G=groups,
                GROUPS=GROUPS,
            )
        self.run(
            product_kernels.low_product,
            (*blocks, parts),
            tuning.low_warps,
            tuning.low_stages,
            states=taken,
            state_scales=scales,
            state_sums=sums,
            numbers=planes.numbers,
            scales=planes.scales,
            leasts=planes.scales if planes.leasts is None else planes.leasts,
            bias=out if bias is None else bias,
            out=out,
            rows=rows,
            N=columns,
            K=taken.shape[1],
            G=groups,
            M=FEW,
            COLUMNS=tuning.low_columns,
            PAIRS=self.split // 64,
            STEP=min(tuning.low_step, self.split // 64),
            FOLD=parts == 1,
            BITS=planes.format.bits,
            OFFSET=planes.format.offset if planes.format.bits == 4 else 0,
            LEAST=planes.leasts is not None,
            WHOLE=whole,
            BIAS=bias is not None,
        )
        return out
