"""What a pass attends to, as tables that the attention kernels read on the device.

Keys are taken in chunks that end at multiples of :data:`CHUNK` positions, and within them in tiles of
:data:`TILE`. The chunks before a pass's first own position are shared by its rows: blocks of rows read them
together, :data:`SPAN` chunks a program. The chunks from there on hold the pass's own keys, and in a tree each
row has its own path through them: such a row is a unit of its own, whose keys are gathered at the places
where they would stand if its path were committed. Both give the same sums in the same order, so that neither
the split nor the other rows can be seen in a row's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.backends.base import check_rows
from tokenswift.interfaces import Segment

CHUNK = 256  # positions of a chunk, as on the CPU
TILE = 64  # positions that a program multiplies at a time
SPAN = 4  # chunks that are merged before spans are; both in their order
ALONE = 64  # rows up to which those of a chain are units of their own, like those of a tree
FIELDS = 7  # of a block or unit: offset, capacity, before, first row, rows, path, ordered
PLACES = 6  # of a row: offset, capacity, slot, before, ordered, here


@dataclass(frozen=True, slots=True)
class Plan:
    """The tables of a pass over n rows.

    Attributes:
        segments: the pass's texts.
        blocks: rows that read shared chunks together, (B, 7): where the
            cache is, in numbers from the first text's, its capacity, committed
            keys, the first row, how many, -1, and whether entries stand at their positions.
        units: rows that read own chunks together, (U, 7): the same, the sixth the row of ``paths`` by which
            keys are gathered, or -1 where they stand at their positions.
        places: of each row, (n, 6): where its cache is, its capacity, its slot there, the keys before its
            unit, whether entries stand at their positions, and its own position.
        paths: of each row of a tree, the rows on its path, (n, deepest).
        spans, own: of shared spans and of own chunks, the most that any row has.
    """

    segments: Sequence[Segment]
    blocks: Int[Tensor, "B 7"]
    units: Int[Tensor, "U 7"]
    places: Int[Tensor, "n 6"]
    paths: Int[Tensor, "n deepest"]
    spans: int
    own: int


def queries_of(width: int, itemsize: int) -> int:
    """Queries that a program of the attention kernel takes, 16 KB at most: one number for a head's width and
    type, so that all passes add up alike."""
    padded = 1 << (width - 1).bit_length()
    return min(64, (1 << 14) // (padded * itemsize))


def plan_of(segments: Sequence[Segment], heads: int, device: torch.device) -> Plan:
    """The plan of a pass with so many query heads.

    Raises:
        ValueError: a segment needs more room than its cache has, or has a parent that is no earlier row.
    """
    blocks: list[list[int]] = []
    units: list[list[int]] = []
    places: list[list[int]] = []
    paths: list[list[int]] = []
    data = segments[0].cache.data
    origin, spans, own = data.data_ptr(), 1, 1
    step = max(1, queries_of(data.shape[3], data.element_size()) * data.shape[1] // heads)
    for segment in segments:
        cache, first, count = segment.cache, len(places), len(segment.tokens)
        check_rows(cache, count, segment.parents)
        offset = (cache.data.data_ptr() - origin) // cache.data.element_size()
        where, before = [offset, cache.data.shape[2]], cache.length
        ordered = int(cache.ordered)
        depths = _depths(count, segment.parents)
        paths += _paths(count, segment.parents)
        alone = segment.parents is not None or count <= ALONE
        for at in range(0, count, step):
            rows = min(step, count - at)
            start = before if alone else before + at  # a long chain's rows before a block are its context
            blocks.append([*where, start, first + at, rows, -1, ordered])
            if not alone:
                units.append(blocks[-1])
            spans = max(spans, -(-(start // CHUNK) // SPAN))
            for row in range(at, at + rows):
                here = before + depths[row]
                if alone:
                    path = -1 if segment.parents is None else first + row
                    units.append([*where, start, first + row, 1, path, ordered])
                places.append([*where, before + row, start, ordered, here])
                own = max(own, here // CHUNK - start // CHUNK + 1)
    deepest = max(map(len, paths), default=1) or 1
    flat = [*blocks, *units, *places, *(path + [0] * (deepest - len(path)) for path in paths)]
    table = torch.tensor([number for row in flat for number in row], dtype=torch.long)
    table = table.to(device, non_blocking=True)
    sizes = [len(blocks) * FIELDS, len(units) * FIELDS, len(places) * PLACES, len(paths) * deepest]
    parts = table.split(sizes)
    widths = (FIELDS, FIELDS, PLACES, deepest)
    made = [part.view(-1, width) for part, width in zip(parts, widths, strict=True)]
    return Plan(segments, made[0], made[1], made[2], made[3], spans, own)


def _depths(count: int, parents: Sequence[int] | None) -> list[int]:
    if parents is None:
        return list(range(count))
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _paths(count: int, parents: Sequence[int] | None) -> list[list[int]]:
    """For each row of a tree, the rows from the root to it; a chain's rows stand at their positions."""
    if parents is None:
        return [[0]] * count
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths
