"""Quantized number formats: blocks of integers with scales, as GGUF files hold them.

All formats here are one arithmetic. A weight is ``scale · u + least``: ``u`` is an integer without sign of a
few bits, or what a table says for it; ``scale`` and ``least`` belong to a group of neighbours in a row. Scale
times number has at most 24 bits, so the product is exact in float32 and a fused multiply-add gives the very
value of the unpacked checkpoint. A format is a function that takes its blocks apart (:class:`Numbers`) and a
line of the table :data:`FORMATS`; `ts_pack` of the CPU kernels does the same. Layouts: llama.cpp's
ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Int, Integer, UInt8
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).tiny
PANEL = 32  # rows of a weight side by side in a panel of the CPU kernels; NR of cpu_tile.h
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

    def panel_bytes(self, columns: int) -> int:
        """Bytes of a panel of :data:`PANEL` rows of K weights, K a multiple of the block (cpu_low.h)."""
        groups, each = self.block // self.group, 1 if self.offset else 2  # scales alone, or with least values
        heads = each * (2 + (groups if groups > 1 else 0)) * PANEL
        return columns // self.block * (heads + self.block * self.bits * PANEL // 8)


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
            numbers = self.format.split(part)
            scale, least = (each[..., None] for each in scales(self.format, numbers))
            u = self.format.meant(numbers.u).unflatten(1, (-1, self.format.group))
            made[start : start + count] = torch.addcmul(least, scale, u).flatten(1)
        return made


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


#: what the 4-bit numbers of IQ4_NL and IQ4_XS stand for
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# ---- parts of blocks ---------------------------------------------------------------------------------------


def _blocks(rows: Tensor, nbytes: int, *sizes: int) -> list[Tensor]:
    """The parts of each block (N, B, size), of so many bytes each and the rest."""
    return list(rows.unflatten(1, (-1, nbytes)).split([*sizes, nbytes - sum(sizes)], -1))


def _half(two: UInt8[Tensor, "N B two"]) -> Float16[Tensor, "N B"]:
    """The float16 number of each block."""
    return two.contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: UInt8[Tensor, "N B *parts half"]) -> UInt8[Tensor, "N K"]:
    """The 4-bit numbers of each part of a block: low halves of all bytes, then high halves."""
    four = packed.clone(memory_format=torch.contiguous_format).view(torch.int32)  # bytes at a time
    return torch.cat((four & 0x0F0F0F0F, four >> 4 & 0x0F0F0F0F), -1).view(torch.uint8).flatten(1)


def _fields(packed: UInt8[Tensor, "N B *parts bytes"], bits: int) -> UInt8[Tensor, "N K"]:
    """Numbers of a few bits of each part of a block: the lowest of all bytes, then the next of all, …"""
    mask = (1 << bits) - 1
    return torch.cat([packed >> place & mask for place in range(0, 8, bits)], -1).flatten(1)


def _single_bits(packed: UInt8[Tensor, "N B four"]) -> UInt8[Tensor, "N K"]:
    """The bits of each block in order."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _sixes(packed: UInt8[Tensor, "N B twelve"]) -> tuple[UInt8[Tensor, "N G"], UInt8[Tensor, "N G"]]:
    """The eight 6-bit scales of each block, and its eight 6-bit least values.

    The first four of either are the low bits of four bytes each. The others have their low 4 bits in the
    last four bytes (scales in the low half) and their high 2 bits on top of the first ones.
    """
    scale, least, low = packed.unflatten(-1, (3, 4)).unbind(-2)
    high_scale, high_least = scale >> 6 << 4, least >> 6 << 4
    scales = torch.cat((scale & 63, low & 15 | high_scale), -1)
    return scales.flatten(1), torch.cat((least & 63, low >> 4 | high_least), -1).flatten(1)


# ---- blocks of 32 ------------------------------------------------------------------------------------------


def _q4_0(rows: Tensor) -> Numbers:
    scale, u = _blocks(rows, 18, 2)
    return Numbers(_nibbles(u), _half(scale))


def _q4_1(rows: Tensor) -> Numbers:
    scale, least, u = _blocks(rows, 20, 2, 2)
    return Numbers(_nibbles(u), _half(scale), _half(least))


def _q5_0(rows: Tensor) -> Numbers:
    scale, high, u = _blocks(rows, 22, 2, 4)
    return Numbers(_nibbles(u) | _single_bits(high) << 4, _half(scale))


def _q5_1(rows: Tensor) -> Numbers:
    scale, least, high, u = _blocks(rows, 24, 2, 2, 4)
    return Numbers(_nibbles(u) | _single_bits(high) << 4, _half(scale), _half(least))


def _q8_0(rows: Tensor) -> Numbers:
    scale, q = _blocks(rows, 34, 2)
    return Numbers((q ^ 128).flatten(1), _half(scale))  # two's complement plus 128


# ---- blocks of 256 -----------------------------------------------------------------------------------------


def _q2_k(rows: Tensor) -> Numbers:
    fine, u, scale, least = _blocks(rows, 84, 16, 64, 2)
    numbers = _fields(u.unflatten(-1, (2, 32)), 2)
    return Numbers(numbers, _half(scale), -_half(least), (fine & 15).flatten(1), (fine >> 4).flatten(1))


def _q3_k(rows: Tensor) -> Numbers:
    high, u, fine, scale = _blocks(rows, 110, 32, 64, 12)
    low = torch.cat((fine[..., :8] & 15, fine[..., :8] >> 4), -1)
    fine = low.flatten(1) | _fields(fine[..., 8:], 2) << 4
    numbers = _fields(u.unflatten(-1, (2, 32)), 2) | _fields(high, 1) << 2
    return Numbers(numbers, _half(scale), fine=fine.view(torch.int8) - 32)


def _q4_k(rows: Tensor) -> Numbers:
    scale, least, packed, u = _blocks(rows, 144, 2, 2, 12)
    return Numbers(_nibbles(u.unflatten(-1, (4, 32))), _half(scale), -_half(least), *_sixes(packed))


def _q5_k(rows: Tensor) -> Numbers:
    scale, least, packed, high, u = _blocks(rows, 176, 2, 2, 12, 32)
    numbers = _nibbles(u.unflatten(-1, (4, 32))) | _fields(high, 1) << 4
    return Numbers(numbers, _half(scale), -_half(least), *_sixes(packed))


def _q6_k(rows: Tensor) -> Numbers:
    low, high, fine, scale = _blocks(rows, 210, 128, 64, 16)
    numbers = _nibbles(low.unflatten(-1, (2, 64))) | _fields(high.unflatten(-1, (2, 32)), 2) << 4
    return Numbers(numbers, _half(scale), fine=fine.contiguous().view(torch.int8).flatten(1))


def _iq4_xs(rows: Tensor) -> Numbers:
    scale, high, low, u = _blocks(rows, 136, 2, 2, 4)
    fine = torch.stack((low & 15, low >> 4), -1).flatten(1) | _fields(high[..., None], 2) << 4
    return Numbers(_nibbles(u.unflatten(-1, (8, 16))), _half(scale), fine=fine.view(torch.int8) - 32)


# ---- quantizing, as llama.cpp does -------------------------------------------------------------------------


def _joined(*numbers: Tensor, u: UInt8[Tensor, "N B n"]) -> UInt8[Tensor, "N R"]:
    """Blocks of float16 numbers (N, B, 1) and 4-bit ones: the first half in the low halves of bytes."""
    low, high = u.chunk(2, -1)
    return torch.cat([*(x.half().view(torch.uint8) for x in numbers), low | high << 4], -1).flatten(1)


def _inverse(scale: Float[Tensor, "N B one"]) -> Float[Tensor, "N B one"]:
    """1 / scale; 0 where that is no number: what float16 holds of such a scale is 0."""
    return torch.where(scale.abs() < SMALLEST, 0.0, 1 / scale)


def _to_q4_0(rows: Tensor) -> Tensor:
    block = rows.unflatten(1, (-1, 32))
    scale = block.gather(-1, block.abs().argmax(-1, keepdim=True)) / -8
    return _joined(scale, u=(block * _inverse(scale) + 8.5).clamp(0, 15).to(torch.uint8))


def _to_q4_1(rows: Tensor) -> Tensor:
    block = rows.unflatten(1, (-1, 32))
    least, most = block.aminmax(dim=-1, keepdim=True)
    scale = (most - least) / 15
    return _joined(scale, least, u=((block - least) * _inverse(scale) + 0.5).clamp(0, 15).to(torch.uint8))


def _to_q8_0(rows: Tensor) -> Tensor:
    block = rows.unflatten(1, (-1, 32))
    scale = block.abs().amax(-1, keepdim=True) / 127
    numbers = block * _inverse(scale)
    floor = numbers.abs().floor()
    q = numbers.sign() * (floor + (2 * (numbers.abs() - floor)).floor())  # halves away from zero
    return torch.cat((scale.half().view(torch.uint8), q.to(torch.int8).view(torch.uint8)), -1).flatten(1)


# ---- the table ---------------------------------------------------------------------------------------------

Q4_0 = Format("q4_0", 2, 32, 18, 4, _q4_0, offset=8, encode=_to_q4_0)
Q4_1 = Format("q4_1", 3, 32, 20, 4, _q4_1, encode=_to_q4_1)
Q8_0 = Format("q8_0", 8, 32, 34, 8, _q8_0, offset=128, encode=_to_q8_0)
#: the first of a file's that has several is what it is called by; `encode` ones may be asked for by name
FORMATS = {
    form.name: form
    for form in (
        Q8_0,
        Format("q6_k", 14, 256, 210, 6, _q6_k, group=16, offset=32),
        Format("q5_k", 13, 256, 176, 5, _q5_k),
        Format("q5_1", 7, 32, 24, 5, _q5_1),
        Format("q5_0", 6, 32, 22, 5, _q5_0, offset=16),
        Format("q4_k", 12, 256, 144, 4, _q4_k),
        Q4_1,
        Q4_0,
        Format("iq4_nl", 20, 32, 18, 4, _q4_0, offset=128, table=IQ4),
        Format("iq4_xs", 23, 256, 136, 4, _iq4_xs, offset=128, table=IQ4),
        Format("q3_k", 11, 256, 110, 4, _q3_k, group=16, offset=4),
        Format("q2_k", 10, 256, 84, 4, _q2_k, group=16),
    )
}
BY_CODE = {form.code: form for form in FORMATS.values()}
