"""The Triton kernels in Triton's interpreter, float32: run by `test_interpreter` in a process of
its own.

The bounds: a float32 sum of n products is within n · 2^-24 of the sum of their sizes. Scores are
sums of at most 256 products, and the weights of values sum to 1, so 2e-5 holds; a key too many
moves them more.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.bounds import in_bounds as in_bounds
from tests.kernels.cuda.bounds import in_order as in_order
from tests.kernels.cuda.cases import CPU, TORCH, batch_of, by_torch, random, segment, shape_of, tree
from tests.kernels.cuda.cases import product as library
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import LayerFeatures, LayerPass
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.launch import Kernels
from tokenswift.kernels.cuda.layers import CudaBody
from tokenswift.kernels.cuda.plan import CHUNK, FAR, NEAR
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import LayerWeights, Shape
from tokenswift.kv.passes import Segment

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # infinite, as on a card
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # by Triton 3.6 itself
]

KERNELS = Kernels(CPU)
BORDER = NEAR * CHUNK
#: committed keys, rows, reach of a tree (None: a chain), window; heads, of keys, and their width
TEXTS = [
    (0, 1, None, 0, 4, 4, 80),
    (5, 7, 3, 0, 3, 1, 16),
    (CHUNK - 3, 9, 1, 0, 14, 2, 96),
    (CHUNK, 2, None, 0, 2, 1, 128),
    (CHUNK + 44, 3, 2, 100, 3, 3, 256),
    (700, 5, 4, 300, 3, 1, 16),
    (BORDER + FAR - 2, 4, 2, 0, 70, 1, 8),
    (BORDER + 100, 2, None, 600, 3, 1, 16),
]


def assert_near(rows: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(rows, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("before,rows,reach,window,heads,kv_heads,width", TEXTS)
def test_attention(
    before: int, rows: int, reach: int | None, window: int, heads: int, kv_heads: int, width: int
) -> None:
    parents = None if reach is None else tree(rows, reach)
    text = segment(before, rows, parents, kv_heads, width)
    shape = shape_of(heads, kv_heads, width)
    if before == 700:
        shape = replace(shape, cap=0.7)
    query = random(rows, heads, width, seed=1)
    attended = KERNELS.attend(batch_of([text], shape), query, 0, shape, window)
    assert_near(attended, by_torch(text, query, shape, window))


def test_a_partial_caches_entries_have_no_positions() -> None:
    """A window holds where an entry is its position, and nowhere else."""
    query = random(3, 2, 16, seed=1)
    shape = shape_of(2, 1, 16)
    ordered = segment(300, 3, [-1, 0, 0], 1, 16, ordered=True)
    partial = segment(300, 3, [-1, 0, 0], 1, 16, ordered=False)
    windowed = KERNELS.attend(batch_of([ordered], shape), query, 0, shape, 50)
    unlimited = KERNELS.attend(batch_of([partial], shape), query, 0, shape, 50)
    assert not torch.allclose(windowed, unlimited, atol=1e-3)
    assert_near(unlimited, by_torch(partial, query, shape))


class Text:
    """A text's last positions, over the end of a chunk."""

    def __init__(self, before: int, tail: int, window: int) -> None:
        self.before = before
        self.window = window
        self.shape = shape_of(2, 1, 16)
        self.cache = segment(before, tail, None, 1, 16).cache
        self.query = random(tail, 2, 16, seed=1)

    def run(
        self, first: int, rows: list[int], parents: list[int] | None, other: Segment | None = None
    ) -> Tensor:
        """Rows of the tail, -1 for a wrong one, over the keys before the first; behind another
        text's rows."""
        before = self.before + first
        text = segment(before, len(rows), parents, 1, 16, seed=7)
        text.cache.data[:, :, :before] = self.cache.data[:, :, :before]
        queries = random(len(rows), 2, 16, seed=3)
        for node, row in enumerate(rows):
            if row >= 0:
                text.cache.data[:, :, before + node] = self.cache.data[:, :, self.before + row]
                queries[node] = self.query[row]
        segments = [text]
        if other is not None:
            segments = [other, text]
            queries = torch.cat([random(len(other.tokens), 2, 16, seed=4), queries])
        batch = batch_of(segments, self.shape)
        return KERNELS.attend(batch, queries, 0, self.shape, self.window)[-len(rows) :]


@pytest.mark.parametrize("before,window", [(CHUNK - 3, 150), (BORDER - 2, 0)])
def test_rows_of_several_texts_and_in_trees_have_their_own_bits(before: int, window: int) -> None:
    """The last positions of a text: one at a time, in one pass, in a tree with wrong branches, and
    beside another text's rows."""
    tail = 5
    text = Text(before, tail, window)
    every = list(range(tail))
    alone = torch.cat([text.run(row, [row], None) for row in every])
    assert torch.equal(text.run(0, every, None), alone)
    assert torch.equal(text.run(0, every, None, segment(20, 3, None, 1, 16, seed=5)), alone)
    rows = [0]
    parents = [-1]
    right = [0]
    for step in range(1, tail):  # each right node has a wrong sibling before it
        rows += [-1, step]
        parents += [right[-1], right[-1]]
        right.append(len(rows) - 1)
    assert torch.equal(text.run(0, rows, parents)[right], alone)


def test_nan_in_another_branch_or_in_unused_room_reaches_no_row() -> None:
    text = segment(300, 3, [-1, 0, 0], 1, 16)
    shape = shape_of(2, 1, 16)
    query = random(3, 2, 16, seed=1)
    expected = KERNELS.attend(batch_of([text], shape), query, 0, shape, 0)
    text.cache.data[:, :, 301] = math.nan
    attended = KERNELS.attend(batch_of([text], shape), query, 0, shape, 0)
    assert torch.equal(attended[[0, 2]], expected[[0, 2]])
    assert attended[1].isnan().any()


def layer_of(
    heads: int, kv_heads: int, width: int, hidden: int, inner: int, norms: bool
) -> LayerWeights:
    rows = (heads + 2 * kv_heads) * width
    return LayerWeights(
        qkv=Packed(random(rows, hidden, seed=1) / 8),
        out=Packed(random(hidden, heads * width, seed=2) / 8),
        gate_up=Packed(random(2 * inner, hidden, seed=3) / 8),
        down=Packed(random(hidden, inner, seed=4) / 8),
        norm=1 + random(hidden, seed=5) / 8,
        mlp_norm=1 + random(hidden, seed=6) / 8,
        qkv_bias=random(rows, seed=7),
        query_norm=1 + random(width, seed=8) / 8 if norms else None,
        key_norm=1 + random(width, seed=9) / 8 if norms else None,
    )


def block_of(kind: str) -> tuple[Shape, LayerWeights]:
    """A layer as most families have it, with all switches of others, or with attention and MLP in
    parallel."""
    shape = replace(shape_of(3, 1, 16), parallel=kind == "parallel")
    layer = layer_of(3, 1, 16, 64, 96, norms=kind == "usual")
    if kind != "switched":
        return shape, layer
    return replace(shape, cap=2.0, residual=0.7, gelu=True, norm_all_heads=True), replace(
        layer,
        mlp_norm=None,
        rope=1,
        window=9,
        query_norm=random(48, seed=3),
        key_norm=random(16, seed=4),
        out_norm=random(64, seed=5),
        down_norm=random(64, seed=6),
    )


class Side:
    """A backend with a layer.

    Args:
        kind: see :func:`block_of`.
    """

    def __init__(self, backend: Backend, kind: str) -> None:
        self.backend = backend
        self.shape, layer = block_of(kind)
        if isinstance(backend, CudaBackend):
            for weight in layer.packed():
                backend.pack(weight.data)
        self.body = backend.body(self.shape, [layer])

    def run(self, before: int, parents: list[int]) -> list[Tensor]:
        """States, queries and features of a pass over two texts."""
        segments = [
            segment(before, len(parents), parents, 1, 16),
            segment(20, 1, [-1], 1, 16, seed=4),
        ]
        batch = self.backend.batch(segments, self.shape)
        count = len(parents) + 1
        rows = len(batch.tokens)
        states = random(16, 64)[:rows]
        angles = random(2, 16, 8)[:, :rows]
        features = LayerFeatures((0, 1), states.new_empty(2, rows, 64))
        layer_pass = LayerPass(
            batch=batch, states=states, cos=angles.cos(), sin=angles.sin(), features=features
        )
        queries = self.backend.layers(self.body, layer_pass)
        return [states[:count], torch.cat(queries, 2), features.states[:, :count]]


@pytest.mark.parametrize("block", ["usual", "switched", "parallel"])
def test_passes_are_the_torch_backends_and_recorded_ones_serve_texts_as_they_grow(
    block: str,
) -> None:
    """A layer with all kernels: the states, queries and features of torch; and one graph's buffers
    for a text of three lengths and for two texts, byte by byte as passes that are not recorded."""
    recording = Side(CudaBackend(CPU, KERNELS, library), block)
    not_recording = CudaBackend(CPU, KERNELS, library)
    not_recording.records = False
    eager = Side(not_recording, block)
    by_torch = Side(TORCH, block)
    for before, parents in ((7, [-1]), (CHUNK + 3, [-1, 0, 0]), (2 * CHUNK - 1, [-1, 0])):
        replays = recording.run(before, parents)
        expected = by_torch.run(before, parents)
        for replayed, same in zip(replays, eager.run(before, parents), strict=True):
            assert torch.equal(replayed, same)
        for replayed, near in zip(replays, expected, strict=True):
            torch.testing.assert_close(replayed, near, rtol=1e-4, atol=1e-4)
    assert isinstance(recording.body, CudaBody)
    assert recording.body.graphs.count == 1
