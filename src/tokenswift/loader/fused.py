"""Projections that files and modules of some families hold as one tensor, row below row, taken
apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from tokenswift.kernels.formats import Stored
from tokenswift.loader.family import DOWN, GATE, KEY, OUTPUT, QUERY, UP, VALUE
from tokenswift.loader.layout import Layout
from tokenswift.loader.tensors import Entry
from tokenswift.types import InputError

#: fused projections of a layer, and what they are made of
FUSED = {
    "self_attn.qkv_proj": (QUERY, KEY, VALUE),
    "mlp.gate_up_proj": (GATE, UP),
}
#: projections of a layer that are not fused
UNFUSED = (OUTPUT, DOWN)


def parts_of(name: str) -> list[str] | None:
    """The names of the weights that a fused one is made of; None: it is none."""
    for fused, parts in FUSED.items():
        if fused in name:
            before, _, end = name.partition(fused)
            return [f"{before}{part}{end}" for part in parts]
    return None


def rows_of(weight: Tensor | Stored, start: int, end: int) -> Tensor | Stored:
    """Some rows of a weight, which are not copied."""
    if isinstance(weight, Stored):
        return Stored(weight.format, weight.blocks[start:end])
    return weight[start:end]


def split_fused(entries: Mapping[str, Entry], layout: Layout, where: str) -> dict[str, Entry]:
    """Tensors of files, with one for each projection in the place of fused ones.

    Args:
        entries: the tensors by our names.
        layout: of a model whose family fuses projections.
        where: the file, for messages.
    Raises:
        InputError: a fused tensor has not the rows of its parts.
    """
    shapes = layout.shapes()
    split: dict[str, Entry] = {}
    for name, entry in entries.items():
        parts = parts_of(name)
        if parts is None or any(part not in shapes for part in parts):
            split[name] = entry
            continue
        rows = sum(shapes[part][0] for part in parts)
        valid = (rows, *shapes[parts[0]][1:])
        if entry.shape != valid:
            raise InputError(f"{where}: tensor {entry.name} is {entry.shape}; valid: {valid}")
        start = 0
        for part in parts:
            end = start + shapes[part][0]
            read = partial(_read_rows, entry, start, end)
            split[part] = Entry(entry.name, shapes[part], entry.kind, read)
            start = end
    return split


def _read_rows(entry: Entry, start: int, end: int) -> Tensor | Stored:
    return rows_of(entry.get(), start, end)


def split_tensors(
    named: Iterable[tuple[str, Tensor]], layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model by name, with one for each projection in the place of fused ones."""
    shapes = layout.shapes()
    for name, tensor in named:
        parts = parts_of(name)
        if parts is None:
            yield name, tensor
        else:
            yield from zip(parts, tensor.split([shapes[part][0] for part in parts]), strict=True)
