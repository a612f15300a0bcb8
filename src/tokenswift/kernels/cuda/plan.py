"""What a pass attends to, as tables that the attention kernels read on the device.

Keys are taken in chunks that end at multiples of :data:`CHUNK` positions, and within them in tiles of
:data:`TILE`. The chunks before a pass's first own position are shared by its rows: blocks of rows read them
together, :data:`SPAN` chunks a program. The chunks from there on hold the pass's own keys, and in a tree each
row has its own path through them: such a row is a unit of its own, whose keys are gathered at the places
where they would stand if its path were committed. Blocks of a long chain's rows that fill a card go over all
keys by themselves. All give the same sums in the same order, so that neither the split nor the other rows can
be seen in a row's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.interfaces import Segment
from tokenswift.kernels.base import check_rows
from tokenswift.kernels.cuda.entries import width_of
from tokenswift.kernels.torch import row_paths
from tokenswift.kv.pages import to_device

CHUNK = 256  # positions of a chunk, as on the CPU
TILE = 64  # positions that a program multiplies at a time
SPAN = 4  # chunks that are merged before spans are; both in their order
ALONE = 64  # rows up to which those of a chain are units of their own, like those of a tree
RECORDED = (16, 64)  # row counts of recorded passes
EARLY = 16  # spans that recorded passes have room for, 16K positions
FIELDS = 8  # of a block or unit: offset, capacity, before, first row, rows, path, ordered, nothing
PLACES = 6  # of a row: offset, capacity, slot (-1: it is not kept), before, ordered, here


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes of a plan's tables.

    Attributes:
        rows, blocks, units: entries of the tables.
        deepest: of a row's path, the most rows.
        spans, own: of shared spans and of own chunks, the most that any row has.
    """

    rows: int
    blocks: int
    units: int
    deepest: int
    spans: int
    own: int

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the four tables."""
        widths = (FIELDS, FIELDS, PLACES, self.deepest)
        return tuple(zip((self.blocks, self.units, self.rows, self.rows), widths, strict=True))

    def recorded(self, capacity: int) -> Form:
        """The form of a recorded pass in which a pass of this form over caches of at most ``capacity``
        entries fits, and others until the text has doubled, or has :data:`EARLY` spans; of few, so that few
        are recorded. Programs of spans beyond are not started."""
        rows = next(size for size in RECORDED if size >= self.rows)
        deepest = next(size for size in (1, *RECORDED) if size >= self.deepest)
        spans = min(power(-(-capacity // (SPAN * CHUNK))), max(EARLY, power(self.spans)))
        return Form(rows, power(self.blocks), rows, deepest, spans, 2)


@dataclass(slots=True)
class Plan:
    """The tables of a pass over n rows.

    Attributes:
        segments: the pass's texts. The kernels look at none of them, but for the size of a head.
        form: sizes of the tables; rows after the segments' own are not kept.
        origin: of the keys' type, from which the places of caches are counted.
        blocks: rows that read shared chunks together, (B, 8): where the cache is, in numbers from the
            origin, its capacity, committed keys, the first row, how many, -1, and whether entries stand at
            their positions.
        units: rows that read own chunks together, (U, 8): the same, the sixth the row of ``paths`` by which
            keys are gathered, or -1 where they stand at their positions.
        places: of each row, (n, 6): where its cache is, its capacity, its slot there, the keys before its
            unit, whether entries stand at their positions, and its own position.
        paths: of each row of a tree, the rows on its path, (n, deepest).
    """

    segments: Sequence[Segment]
    form: Form
    origin: Tensor
    blocks: Int[Tensor, "B 8"]
    units: Int[Tensor, "U 8"]
    places: Int[Tensor, "n 6"]
    paths: Int[Tensor, "n deepest"]

    @property
    def whole(self) -> bool:
        """Whether keys and values are int8."""
        return self.origin.dtype == torch.int8

    @property
    def long(self) -> bool:
        """Whether all rows are those of long chains, whose blocks are their units."""
        return all(segment.parents is None and len(segment.tokens) > ALONE for segment in self.segments)

    @classmethod
    def over(
        cls, numbers: Int[Tensor, " m"], form: Form, segments: Sequence[Segment], origin: Tensor
    ) -> Plan:
        """The plan whose tables stand in ``numbers`` one after the other."""
        parts = numbers.split([rows * columns for rows, columns in form.sizes])
        tables = [part.view(size) for part, size in zip(parts, form.sizes, strict=True)]
        return cls(segments, form, origin, *tables)


class Tables:
    """A pass's tables on the host.

    Args:
        segments: its texts.
        heads: query heads.
        origin: where places of caches are counted from, of their type.

    Attributes:
        form: the smallest that they have.

    Raises:
        ValueError: a segment needs more room than its cache has, or has a parent that is no earlier row.
    """

    def __init__(self, segments: Sequence[Segment], heads: int, origin: Tensor) -> None:
        self.blocks: list[list[int]] = []
        self.units: list[list[int]] = []
        self.places: list[list[int]] = []
        self.paths: list[list[int]] = []
        self.spans = self.own = 1
        for segment in segments:
            self._add(segment, heads, origin)
        deepest = max(map(len, self.paths), default=1) or 1
        sizes = len(self.places), len(self.blocks), len(self.units)
        self.form = Form(*sizes, deepest, self.spans, self.own)

    def _add(self, segment: Segment, heads: int, origin: Tensor) -> None:
        cache, first, count = segment.cache, len(self.places), len(segment.tokens)
        data, before, ordered = cache.data, cache.length, int(cache.ordered)
        check_rows(cache, count, segment.parents)
        step = max(1, queries_of(width_of(data), data.element_size()) * data.shape[1] // heads)
        where = [(data.data_ptr() - origin.data_ptr()) // data.element_size(), data.shape[2]]
        # a chain's rows stand at their positions, whatever their paths
        paths = [[0]] * count if segment.parents is None else row_paths(count, segment.parents)
        self.paths += paths
        alone = segment.parents is not None or count <= ALONE
        for at in range(0, count, step):
            rows = min(step, count - at)
            start = before if alone else before + at  # a long chain's rows before a block are its context
            self.blocks.append([*where, start, first + at, rows, -1, ordered, 0])
            if not alone:
                self.units.append(self.blocks[-1])
            self.spans = max(self.spans, -(-(start // CHUNK) // SPAN))
            for row in range(at, at + rows):
                here = before + (row if segment.parents is None else len(paths[row]) - 1)
                if alone:
                    path = -1 if segment.parents is None else first + row
                    self.units.append([*where, start, first + row, 1, path, ordered, 0])
                self.places.append([*where, before + row, start, ordered, here])
                self.own = max(self.own, here // CHUNK - start // CHUNK + 1)

    def numbers(self, form: Form) -> list[int]:
        """The tables one after the other, filled up to a form: with blocks of no rows, and with rows that see
        the first key of all and are not kept."""
        blocks = self.blocks + [[0, 0, 0, 1, 0, -1, 0, 0]] * (form.blocks - len(self.blocks))
        more = range(len(self.places), form.rows)
        where = self.places[0][:2]
        places = self.places + [[*where, -1, 0, 1, 0]] * len(more)
        units = self.units + [[*where, 0, row, 1, -1, 1, 0] for row in more]
        paths = self.paths + [[0]] * len(more)
        flat = [number for row in (*blocks, *units, *places) for number in row]
        for path in paths:
            flat += path + [0] * (form.deepest - len(path))
        return flat


def queries_of(width: int, itemsize: int) -> int:
    """Queries that a program of the attention kernel takes, 16 KB at most: one number for a head's width and
    type, so that all passes add up alike."""
    padded = 1 << (width - 1).bit_length()
    return min(64, (1 << 14) // (padded * itemsize))


def plan_of(
    segments: Sequence[Segment], heads: int, device: torch.device, origin: Tensor | None = None
) -> Plan:
    """The plan of a pass with so many query heads, of its own form.

    Args:
        origin: see `Plan`; by default the first text's cache.
    Raises:
        ValueError: a segment needs more room than its cache has, or has a parent that is no earlier row.
    """
    origin = segments[0].cache.data if origin is None else origin
    tables = Tables(segments, heads, origin)
    numbers = to_device(tables.numbers(tables.form), device)
    return Plan.over(numbers, tables.form, segments, origin)


def power(count: int) -> int:
    """The power of two that is no smaller."""
    return 1 << max(0, count - 1).bit_length()
