"""What a pass attends to, as tables that the kernels read on the device.

Keys are taken in *chunks* that end at fixed positions: :data:`NEAR` chunks of :data:`CHUNK`
positions, and chunks of :data:`FAR` behind them, where fewer sums in memory matter more than more
programs. Chunks that lie before a pass's own keys, the *prefix*, are shared by a sequence's rows:
blocks of rows read them together. In the chunks from there on, those of the *tree*, each row has
its own path through the pass's keys: they are gathered at the positions where they would stand if
its path were committed. Both give the same sums, so neither the split nor the other rows can be
seen in a row's bits; and as tables say how long sequences are and where, one recorded pass serves
sequences as they grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from tokenswift.kernels.batch import Batch, check_rows, row_paths
from tokenswift.kernels.weights import Shape
from tokenswift.kv.passes import Segment

CHUNK = 256  # positions of each of the first chunks
NEAR = 64  # how many they are
FAR = 1024  # positions of each chunk behind them
TILE = 64  # positions that a program multiplies at a time
ROW_COUNTS = (16, 64)  # row counts of recorded passes, and of products
RECORDED_CHUNKS = 16  # the fewest prefix chunks that a recorded pass has room for


class RowEntry(NamedTuple):
    """What the kernels read of a row; the kernels name the fields by their numbers.

    Attributes:
        base: where its cache is, in numbers from `CudaBatch.origin`.
        capacity: entries of a head in the cache.
        before: committed keys.
        slot: the row's slot in the cache; -1: its key and value are not kept.
        position: its own; -1: no row, it fills up a pass.
        ordered: 1 where the cache's entries stand at their positions.
    """

    base: int
    capacity: int
    before: int
    slot: int
    position: int
    ordered: int


FIELDS = len(RowEntry._fields)
#: a row that fills up a pass: it sees nothing and is not kept
NO_ROW = RowEntry(base=0, capacity=1, before=0, slot=-1, position=-1, ordered=1)


class TableSizes(NamedTuple):
    """Sizes of a pass's tables.

    Attributes:
        rows: rows of the pass.
        blocks: blocks of rows that read the prefix together.
        deepest: the most rows on a row's path.
        prefix_chunks: room for chunks of the prefix.
        tree_chunks: the most chunks in which a row's own keys may stand.
    """

    rows: int
    blocks: int
    deepest: int
    prefix_chunks: int
    tree_chunks: int

    def recorded(self) -> TableSizes:
        """The sizes of a recorded pass in which this one fits; few sizes, so that few passes are
        recorded."""
        rows = self.padded().rows
        return TableSizes(
            rows=rows,
            blocks=next_power(self.blocks),
            deepest=rows,
            prefix_chunks=max(RECORDED_CHUNKS, next_power(self.prefix_chunks)),
            tree_chunks=2,
        )

    def padded(self) -> TableSizes:
        """With rows up to a number that products take without being filled up."""
        fitting = (count for count in ROW_COUNTS if count >= self.rows)
        multiple = next(fitting, ROW_COUNTS[-1])
        return self._replace(rows=-(-self.rows // multiple) * multiple)


@dataclass(slots=True, kw_only=True)
class CudaBatch(Batch):
    """A batch with its tables.

    Attributes:
        sizes: the tables' sizes.
        numbers: tokens, positions and tables one after the other.
        origin: a tensor of the keys' type, from which the places of caches are counted.
        row_table: a :class:`RowEntry` of each row, (n, 6).
        blocks: blocks of rows of one sequence, (B, 2): the first row, and how many.
        paths: of each row, the rows on its path, (n, deepest).
        is_prompt: whether a prompt is read, whose attention is torch's.
        recorded: whether the pass may be recorded.
    """

    sizes: TableSizes
    numbers: Int[Tensor, " m"]
    origin: Tensor
    row_table: Int[Tensor, "n 6"]
    blocks: Int[Tensor, "B 2"]
    paths: Int[Tensor, "n deepest"]
    is_prompt: bool = False
    recorded: bool = False

    @classmethod
    def from_numbers(
        cls,
        numbers: Int[Tensor, " m"],
        sizes: TableSizes,
        segments: Sequence[Segment],
        origin: Tensor,
        is_prompt: bool = False,
        recorded: bool = False,
    ) -> CudaBatch:
        """The batch whose tables of some sizes stand in ``numbers``; see :meth:`Tables.numbers`."""
        rows = sizes.rows
        lengths = [rows, rows, rows * FIELDS, 2 * sizes.blocks, rows * sizes.deepest]
        tokens, positions, row_table, blocks, paths = numbers.split(lengths)
        return cls(
            segments=segments,
            tokens=tokens,
            positions=positions,
            sizes=sizes,
            numbers=numbers,
            origin=origin,
            row_table=row_table.view(-1, FIELDS),
            blocks=blocks.view(-1, 2),
            paths=paths.view(-1, sizes.deepest),
            is_prompt=is_prompt,
            recorded=recorded,
        )

    def with_numbers(self, numbers: Int[Tensor, " m"]) -> CudaBatch:
        """The batch with other numbers in tables of the same sizes."""
        return CudaBatch.from_numbers(
            numbers, self.sizes, self.segments, self.origin, is_prompt=self.is_prompt
        )


class Tables:
    """A pass's tables on the host.

    Args:
        segments: its sequences.
        block_rows: rows of a block.
        origin: see :class:`CudaBatch`.
        is_prompt: no table is needed for attention.

    Attributes:
        sizes: the smallest that they have.
    Raises:
        ValueError: a segment needs more room than its cache has, or has a parent that is no earlier
            row.
    """

    def __init__(
        self, segments: Sequence[Segment], block_rows: int, origin: Tensor, is_prompt: bool
    ) -> None:
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._rows: list[RowEntry] = []
        self._blocks: list[int] = []
        self._paths: list[list[int]] = []
        self._prefix_chunks = 1
        self._tree_chunks = 1
        for segment in segments:
            self._add(segment, block_rows, origin, is_prompt)
        self.sizes = TableSizes(
            rows=len(self._rows),
            blocks=len(self._blocks) // 2,
            deepest=max(len(path) for path in self._paths),
            prefix_chunks=self._prefix_chunks,
            tree_chunks=self._tree_chunks,
        )

    def _add(self, segment: Segment, block_rows: int, origin: Tensor, is_prompt: bool) -> None:
        cache = segment.cache
        count = len(segment.tokens)
        check_rows(cache, count, segment.parents)
        self._tokens += segment.tokens.tolist()
        self._positions += segment.positions.tolist()
        first = len(self._rows)
        for start in range(0, count, block_rows):
            self._blocks += [first + start, min(block_rows, count - start)]
        data = cache.data
        before = cache.length
        base = (data.data_ptr() - origin.data_ptr()) // data.element_size()
        paths = [[0]] * count if is_prompt else row_paths(count, segment.parents)
        self._paths += paths
        self._prefix_chunks = max(self._prefix_chunks, chunk_of(before))
        for row, path in enumerate(paths):
            position = before + (row if is_prompt else len(path) - 1)
            entry = RowEntry(
                base=base,
                capacity=data.shape[2],
                before=before,
                slot=before + row,
                position=position,
                ordered=int(cache.ordered),
            )
            self._rows.append(entry)
            chunks = chunk_of(position) - chunk_of(before) + 1
            self._tree_chunks = max(self._tree_chunks, chunks)

    def numbers(self, sizes: TableSizes) -> list[int]:
        """All of it one after the other, filled up to some sizes: by rows that see nothing and are
        not kept, and by blocks of no rows."""
        missing_rows = sizes.rows - len(self._rows)
        missing_blocks = sizes.blocks - len(self._blocks) // 2
        numbers = [*self._tokens, *[0] * missing_rows, *self._positions, *[0] * missing_rows]
        for entry in self._rows:
            numbers += entry
        numbers += [*NO_ROW] * missing_rows
        numbers += self._blocks
        numbers += [0, 0] * missing_blocks
        for path in self._paths:
            numbers += path + [0] * (sizes.deepest - len(path))
        return numbers + [0] * (missing_rows * sizes.deepest)


def chunk_of(position: int) -> int:
    """The chunk that a position is in."""
    near = NEAR * CHUNK
    return position // CHUNK if position < near else NEAR + (position - near) // FAR


def block_rows_of(shape: Shape) -> int:
    """Rows of a block: those whose queries over one KV head a program takes."""
    queries = queries_per_program(shape.width, shape.keys.itemsize)
    return max(1, queries * shape.kv_heads // shape.heads)


def queries_per_program(width: int, itemsize: int) -> int:
    """Queries that a program of attention takes, 16 KB at most: one number for a head's width and
    type, so that all passes add up alike."""
    return min(64, (1 << 14) // (next_power(width) * itemsize))


def next_power(count: int) -> int:
    """The power of two that is no smaller."""
    return 1 << max(0, count - 1).bit_length()
