"""Weights as the card reads them: dense, or quantized, in planes of integers and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Int
from torch import Tensor
from torch.nn.functional import pad

from tokenswift.kernels.formats.format import Format, Numbers, Stored, values_of
from tokenswift.kernels.weights import Packed, Part

#: formats that stay as they are, all of blocks of 32; others become dense
KEPT = ("q8_0", "q4_0", "q4_1")


@dataclass(frozen=True, slots=True)
class Planes:
    """The numbers of rows (N, K) of a format; G groups of 32 a row, up to an even number.

    Attributes:
        format: theirs.
        columns: K.
        numbers: (N, 32 G) int8, less the offset, for 8 bits; for 4 bits (N, 16 G) uint8, which hold pairs of
            groups, the first group's numbers in the low halves.
        scales: 0 for a group beyond K.
        leasts: where the format has them.
    """

    format: Format
    columns: int
    numbers: Tensor
    scales: Float16[Tensor, "N G"]
    leasts: Float16[Tensor, "N G"] | None

    @classmethod
    def of(cls, stored: Stored, device: torch.device) -> Planes:
        """The planes of a weight."""
        found, columns = stored.format.split(stored.blocks.to(device)), stored.shape[1]
        odd = columns // 32 % 2
        u = pad(found.u, (0, 32 * odd))
        if stored.format.bits == 4:
            pairs = u.unflatten(1, (-1, 2, 32))
            u = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
        else:
            u = (u ^ 128).view(torch.int8)
        leasts = None if found.least is None else pad(found.least, (0, odd)).contiguous()
        return cls(stored.format, columns, u.contiguous(), pad(found.scale, (0, odd)).contiguous(), leasts)

    def values(self, rows: Int[Tensor, " m"] | slice) -> Float[Tensor, "m K"]:
        """Some rows, float32."""
        u, groups = self.numbers[rows], self.columns // 32
        if self.format.bits == 4:
            pairs = u.unflatten(1, (-1, 32))
            u = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)
        else:
            u = u.view(torch.uint8) ^ 128
        leasts = None if self.leasts is None else self.leasts[rows][:, :groups]
        numbers = Numbers(u[:, : self.columns], self.scales[rows][:, :groups], leasts)
        return values_of(self.format, numbers)

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        parts = (self.numbers, self.scales, *(() if self.leasts is None else (self.leasts,)))
        return sum(part.numel() * part.element_size() for part in parts)


class CudaPacked(Packed):
    """A linear layer's weight (N, K) on a device: dense, or in quantized parts.

    Args:
        weight, dtype: see `Packed`.
        device: where it goes.

    Attributes:
        planes: of each part; None for a dense one.
    """

    def __init__(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self.planes: list[Planes | None] = []
        super().__init__(weight, False, dtype)

    def _stays(self, part: Stored) -> bool:
        return part.format.name in KEPT

    def _part(self, run: Stored | list[Tensor]) -> Part:
        if isinstance(run, Stored):
            self.planes.append(planes := Planes.of(run, self._device))
            return Part(planes.numbers, len(run), run.format)
        self.planes.append(None)
        part = super()._part(run)
        return Part(part.data.to(self._device), part.rows)

    def is_dense(self, dtype: torch.dtype) -> bool:
        """Whether it is one matrix of a type."""
        return self.planes == [None] and self.data.dtype == dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes."""
        dense = (part.data.numel() * part.data.element_size() for part in self.parts if part.format is None)
        return sum(dense) + sum(planes.nbytes for planes in self.planes if planes is not None)

    def take(self, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """Some rows; see `Backend.take`."""
        if len(self.parts) > 1:
            return self.unpack()[ids]
        planes = self.planes[0]
        return self.data[ids] if planes is None else planes.values(ids).to(self.dtype)

    def unpack(self) -> Float[Tensor, "N K"]:
        """The weight as it was, of the type of products."""
        both = zip(self.parts, self.planes, strict=True)
        values = [part.data if planes is None else planes.values(slice(None)) for part, planes in both]
        return (
            torch.cat([each.to(self.dtype) for each in values])
            if len(values) > 1
            else values[0].to(self.dtype)
        )
