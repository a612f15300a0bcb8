"""What a pass attends to, as tables that the kernels read on the device.

Keys are taken in *pieces* that end at fixed positions: :data:`NEAR` pieces of :data:`CHUNK`
    positions, and
pieces of :data:`FAR` behind them, where fewer sums in memory matter more than more programs. Pieces
that lie before a pass's own keys are shared by a text's rows: blocks of rows read them together. In
the pieces from there on each row has its own path through the pass's keys: they are gathered at the
places where they would stand if its path were committed. Both give the same sums, so neither the
split nor the other rows can be seen in a row's bits; and as tables say how long texts are and
where, one recorded pass serves texts as they grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from tokenswift.kernels.batch import Batch, check_rows, row_paths
from tokenswift.kv.passes import Segment

CHUNK, NEAR, FAR = 256, 64, 1024
TILE = 64  # positions that a program multiplies at a time
FIELDS = (
    6  # of a row: base, capacity, before, slot (-1: it is not kept), here (-1: no row), ordered
)
SIZES = (16, 64)  # row counts of recorded passes, and of products


class Form(NamedTuple):
    """Sizes of a pass's tables.

    Attributes:
        rows, blocks: entries of the tables.
        deepest: of a row's path, the most rows.
        pieces: room for shared ones.
        own: the most pieces in which a row's own keys may stand.
    """

    rows: int
    blocks: int
    deepest: int
    pieces: int
    own: int

    def recorded(self) -> Form:
        """The form of a recorded pass in which this one fits; of few, so that few are recorded."""
        size = self.whole().rows
        return Form(size, power(self.blocks), size, max(16, power(self.pieces)), 2)

    def whole(self) -> Form:
        """With rows up to a number that products take without being filled up."""
        size = next((size for size in SIZES if size >= self.rows), SIZES[-1])
        return self._replace(rows=-(-self.rows // size) * size)


@dataclass(slots=True, kw_only=True)
class CudaBatch(Batch):
    """A batch with its tables.

    Attributes:
        form: their sizes.
        numbers: tokens, positions and tables one after the other.
        origin: of the keys' type, from which the places of caches are counted.
        rows_at: of each row, (n, 6): where its cache is, in numbers from the origin, its capacity,
            committed keys, the row's slot there, its own position, and whether entries stand at
            their positions.
        blocks: of rows of one text, (B, 2): the first, and how many.
        paths: of each row, the rows on its path, (n, deepest).
        reads: a prompt is read, whose attention is torch's.
        recorded: whether the pass may be recorded.
    """

    form: Form
    numbers: Int[Tensor, " m"]
    origin: Tensor
    rows_at: Int[Tensor, "n 6"]
    blocks: Int[Tensor, "B 2"]
    paths: Int[Tensor, "n deepest"]
    reads: bool = False
    recorded: bool = False

    @classmethod
    def over(
        cls,
        numbers: Int[Tensor, " m"],
        form: Form,
        segments: Sequence[Segment],
        origin: Tensor,
        reads: bool = False,
        recorded: bool = False,
    ) -> CudaBatch:
        """The batch whose tables of some sizes stand in ``numbers``."""
        n, blocks, deepest = form.rows, form.blocks, form.deepest
        tokens, positions, *tables = numbers.split([n, n, n * FIELDS, 2 * blocks, n * deepest])
        rows_at, pairs, paths = (
            table.view(-1, columns)
            for table, columns in zip(tables, (FIELDS, 2, deepest), strict=True)
        )
        made = {
            "form": form,
            "numbers": numbers,
            "origin": origin,
            "reads": reads,
            "recorded": recorded,
        }
        return cls(segments, tokens, positions, rows_at=rows_at, blocks=pairs, paths=paths, **made)


class Tables:
    """A pass's tables on the host.

    Args:
        segments: its texts.
        step: rows of a block.
        origin: see :class:`CudaBatch`.
        reads: no table is needed for attention.

    Attributes:
        form: the smallest that they have.
    Raises:
        ValueError: a segment needs more room than its cache has, or has a parent that is no earlier
            row.
    """

    def __init__(self, segments: Sequence[Segment], step: int, origin: Tensor, reads: bool) -> None:
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._rows: list[list[int]] = []
        self._blocks: list[int] = []
        self._paths: list[list[int]] = []
        pieces = own = 1
        for segment in segments:
            cache, first, count = segment.cache, len(self._rows), len(segment.tokens)
            check_rows(cache, count, segment.parents)
            self._tokens += segment.tokens.tolist()
            self._positions += segment.positions.tolist()
            data, before = cache.data, cache.length
            where = [
                (data.data_ptr() - origin.data_ptr()) // data.element_size(),
                data.shape[2],
                before,
            ]
            paths = [[0]] * count if reads else row_paths(count, segment.parents)
            self._paths += paths
            for row, path in enumerate(paths):
                here = before + (row if reads else len(path) - 1)
                self._rows.append([*where, before + row, here, int(cache.ordered)])
                own = max(own, piece_of(here) - piece_of(before) + 1)
            for at in range(0, count, step):
                self._blocks += [first + at, min(step, count - at)]
            pieces = max(pieces, piece_of(before))
        deepest = max(map(len, self._paths))
        self.form = Form(len(self._rows), len(self._blocks) // 2, deepest, pieces, own)

    def numbers(self, form: Form) -> list[int]:
        """All of it one after the other, filled up to a form: by rows that see nothing and are not
        kept, and by blocks of no rows."""
        more = form.rows - len(self._rows)
        made = [*self._tokens, *[0] * more, *self._positions, *[0] * more]
        for row in self._rows:
            made += row
        made += (
            [0, 1, 0, -1, -1, 1] * more
            + self._blocks
            + [0, 0] * (form.blocks - len(self._blocks) // 2)
        )
        for path in self._paths:
            made += path + [0] * (form.deepest - len(path))
        return made + [0] * (more * form.deepest)


def piece_of(position: int) -> int:
    """The piece that a position is in."""
    near = NEAR * CHUNK
    return position // CHUNK if position < near else NEAR + (position - near) // FAR


def queries_of(width: int, itemsize: int) -> int:
    """Queries that a program of attention takes, 16 KB at most: one number for a head's width and
    type, so that all passes add up alike."""
    return min(64, (1 << 14) // (power(width) * itemsize))


def power(count: int) -> int:
    """The power of two that is no smaller."""
    return 1 << max(0, count - 1).bit_length()
