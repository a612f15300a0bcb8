"""What a quantized number format is: blocks of integers with scales, as GGUF files hold them.

All formats here are one arithmetic. A weight is ``scale · u + least``: ``u`` is an integer without sign of a
few bits, or what a table says for it; ``scale`` and ``least`` belong to a group of neighbours in a row. Scale
times number has at most 24 bits, so the product is exact in float32 and a fused multiply-add gives the very
value of the unpacked checkpoint. How blocks hold these numbers is said in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Int, Integer, UInt8
from torch import Tensor

AT_ONCE = 1 << 18  # weights that are unpacked together: what is made on the way stays in the caches


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of rows (N, K) of a weight; G groups and B blocks a row.

    Attributes:
        u: integers, below ``2 ** bits``.
        scale: of each block.
        least: of each block; None where the format has an offset instead.
        fine: factor of the scale of each group; None where a block is one group.
        fine_least: factor of the least of each group.
    """

    u: UInt8[Tensor, "N K"]
    scale: Float16[Tensor, "N B"]
    least: Float16[Tensor, "N B"] | None = None
    fine: Integer[Tensor, "N G"] | None = None
    fine_least: Integer[Tensor, "N G"] | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A number format.

    Attributes:
        name: as users write it.
        code: of GGUF's list of types.
        block, nbytes: weights of a block, and the bytes that it takes.
        bits: of the integers, in panels.
        split: the numbers of rows of blocks, (N, bytes of a row) → :class:`Numbers`.
        group: weights that share a scale: a block, or a part of it.
        offset: what is taken from each integer; 0 where a least value is added.
        table: what the integers stand for, less the offset; None: themselves.
        encode: quantizes float32 rows (N, K), K a multiple of the block; None where nothing writes the
            format.
    """

    name: str
    code: int
    block: int
    nbytes: int
    bits: int
    split: Callable[[Tensor], Numbers]
    group: int = 32
    offset: int = 0
    table: tuple[int, ...] | None = None
    encode: Callable[[Tensor], Tensor] | None = None

    def meant(self, u: UInt8[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        """What integers stand for, with the offset."""
        if self.table is None:
            return u.float()
        return (torch.tensor(self.table, dtype=torch.float32, device=u.device) + self.offset)[u.int()]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of K weights.

        Raises:
            ValueError: K is no multiple of the block.
        """
        if columns % self.block:
            raise ValueError(f"a {self.name} weight has {columns} columns; valid: a multiple of {self.block}")
        return columns // self.block * self.nbytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight (N, K) as a file holds it.

    Attributes:
        format: of its blocks.
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
        rows, which = (places // columns).unique(return_inverse=True)
        return self.take(rows).decode()[which, places % columns]

    def decode(self) -> Float[Tensor, "N K"]:
        """The weight in float32: what every kernel computes with."""
        rows, columns = self.shape
        made = torch.empty(rows, columns, dtype=torch.float32, device=self.blocks.device)
        count = max(1, AT_ONCE // max(columns, 1))
        for start in range(0, rows, count):
            part = self.blocks[start : start + count]
            made[start : start + count] = values_of(self.format, self.format.split(part))
        return made


def values_of(form: Format, numbers: Numbers) -> Float[Tensor, "N K"]:
    """The weights that numbers stand for, float32."""
    scale, least = scales(form, numbers)
    u = form.meant(numbers.u).unflatten(1, (-1, form.group))
    return torch.addcmul(least[..., None], scale[..., None], u).flatten(1)


def scales(form: Format, numbers: Numbers) -> tuple[Float[Tensor, "N G"], Float[Tensor, "N G"]]:
    """Scale and least value of each group, float32; both are exact."""
    groups = form.block // form.group
    scale = numbers.scale.float().repeat_interleave(groups, 1)
    if numbers.fine is not None:
        scale = scale * numbers.fine
    if numbers.least is None:
        return scale, -form.offset * scale
    least = numbers.least.float().repeat_interleave(groups, 1)
    return scale, least if numbers.fine_least is None else least * numbers.fine_least
