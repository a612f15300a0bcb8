"""Accelerators by their makers' figures; light: no torch in here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenswift.checks import check_choice

if TYPE_CHECKING:
    from tokenswift.roofline.passes import Sizes


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator: figures that do not depend on rows (implements `passes.Machine`).

    Attributes:
        arithmetic: operations in a second by type of product; int8 is taken for bfloat16.
        formats: quantized formats that products read as they are stored.
        processors: that programs of a kernel are spread over; 0: it is not said.
        generation: the first number of its compute capability.
    """

    name: str
    source: str
    bandwidth: float
    arithmetic: Mapping[str, float]
    formats: Collection[str] = ("q8_0", "q4_0", "q4_1")
    device: str = "cuda"
    processors: int = 0
    generation: int = 0

    def keeps(self, kind: str, dtype: str) -> bool:
        """See `passes.Machine`."""
        return kind in self.formats

    def products(self, sizes: Sizes, stored: str, rows: int) -> float:
        """See `passes.Machine`."""
        return self.arithmetic["bfloat16" if sizes.whole else sizes.dtype]

    def attention(self, sizes: Sizes, rows: int) -> float:
        """See `passes.Machine`."""
        return self.arithmetic[sizes.dtype]


def _published(
    name: str, where: str, gigabytes: float, float32: float, half: float, processors: int, generation: int
) -> Card:
    """A card by its maker's figures: GB/s, TFLOPS of dense products that are summed in float32, streaming
    multiprocessors, and generation."""
    types = {"float32": float32 * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}
    source = f"published by NVIDIA: {where}"
    return Card(name, source, gigabytes * 1e9, types, processors=processors, generation=generation)


#: cards by the names that users write
CARDS = {
    "h100": _published("NVIDIA H100 SXM 80 GB", "H100 data sheet", 3350, 67, 989.5, 132, 9),
    "h200": _published("NVIDIA H200 SXM 141 GB", "H200 data sheet", 4800, 67, 989.5, 132, 9),
    "a100": _published("NVIDIA A100 SXM 80 GB", "A100 data sheet", 2039, 19.5, 312, 108, 8),
    "4090": _published("NVIDIA GeForce RTX 4090", "Ada architecture white paper", 1008, 82.6, 165.2, 128, 8),
    "l40s": _published("NVIDIA L40S", "L40S data sheet", 864, 91.6, 362.05, 142, 8),
}


def card_named(name: str) -> Card:
    """One of :data:`CARDS`; InputError names those that there are."""
    check_choice("gpu", name, tuple(CARDS))
    return CARDS[name]
