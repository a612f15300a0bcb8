"""The Triton kernels in Triton's interpreter, float32: run by `test_interpreter` in a process of
its own.

The bounds: a float32 sum of n products is within n · 2^-24 of the sum of their sizes. Scores are
    sums of at
most 256 products, and the weights of values sum to 1, so 2e-5 holds; a key too many moves them
more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.bounds import in_bounds as in_bounds
from tests.kernels.cuda.bounds import in_order as in_order
from tests.kernels.cuda.cases import CPU, TORCH, batch_of, by_torch, random, segment, shape_of, tree
from tests.kernels.cuda.cases import product as library
from tokenswift.kernels.batch import Taps
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.launch import Kernels
from tokenswift.kernels.cuda.plan import CHUNK, FAR, NEAR
from tokenswift.kernels.weights import LayerWeights, Packed

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # infinite, as on a card
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # by Triton 3.6 itself
]

KERNELS = Kernels(CPU)
BORDER = NEAR * CHUNK
NEAR_ENOUGH: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}
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


@pytest.mark.parametrize("before,rows,reach,window,heads,kv_heads,width", TEXTS)
def test_attention(
    before: int, rows: int, reach: int | None, window: int, heads: int, kv_heads: int, width: int
) -> None:
    parents = None if reach is None else tree(rows, reach)
    text, shape = segment(before, rows, parents, kv_heads, width), shape_of(heads, kv_heads, width)
    if before == 700:
        shape = replace(shape, cap=0.7)
    query = random(rows, heads, width, seed=1)
    found = KERNELS.attend(batch_of([text], shape), query, 0, shape, window)
    torch.testing.assert_close(found, by_torch(text, query, shape, window), **NEAR_ENOUGH)


def test_a_partial_caches_entries_have_no_positions() -> None:
    """A window holds where an entry is its position, and nowhere else."""
    query, shape = random(3, 2, 16, seed=1), shape_of(2, 1, 16)
    texts = [segment(300, 3, [-1, 0, 0], 1, 16, ordered=ordered) for ordered in (True, False)]
    windowed, whole = (
        KERNELS.attend(batch_of([text], shape), query, 0, shape, 50) for text in texts
    )
    assert not torch.allclose(windowed, whole, atol=1e-3)
    torch.testing.assert_close(whole, by_torch(texts[1], query, shape), **NEAR_ENOUGH)


@pytest.mark.parametrize("before,window", [(CHUNK - 3, 150), (BORDER - 2, 0)])
def test_rows_of_several_texts_and_in_trees_have_their_own_bits(before: int, window: int) -> None:
    """The last positions of a text, over the end of a piece: one at a time, in one pass, in a tree
    with wrong branches, and beside another text's rows."""
    tail, shape = 5, shape_of(2, 1, 16)
    whole, query = segment(before, tail, None, 1, 16), random(tail, 2, 16, seed=1)

    def run(first: int, rows: list[int], parents: list[int] | None, beside: bool = False) -> Tensor:
        """Rows of the tail, -1 for a wrong one, over the keys before the first."""
        text = segment(before + first, len(rows), parents, 1, 16, seed=7)
        text.cache.data[:, :, : before + first] = whole.cache.data[:, :, : before + first]
        wrong = random(len(rows), 2, 16, seed=3)
        for at, row in enumerate(rows):
            if row >= 0:
                text.cache.data[:, :, before + first + at] = whole.cache.data[:, :, before + row]
                wrong[at] = query[row]
        other = segment(20, 3, None, 1, 16, seed=5)
        texts = [other, text] if beside else [text]
        queries = torch.cat([random(3, 2, 16, seed=4), wrong]) if beside else wrong
        return KERNELS.attend(batch_of(texts, shape), queries, 0, shape, window)[-len(rows) :]

    alone = torch.cat([run(row, [row], None) for row in range(tail)])
    assert torch.equal(run(0, list(range(tail)), None), alone)
    assert torch.equal(run(0, list(range(tail)), None, beside=True), alone)
    rows, parents, last = [0], [-1], 0
    for step in range(1, tail):  # each right node has a wrong sibling before it
        rows, parents, last = [*rows, -1, step], [*parents, last, last], len(rows) + 1
    right = [at for at, row in enumerate(rows) if row >= 0]
    assert torch.equal(run(0, rows, parents)[right], alone)


def test_nan_in_another_branch_or_in_unused_room_reaches_no_row() -> None:
    text, shape = segment(300, 3, [-1, 0, 0], 1, 16), shape_of(2, 1, 16)
    query = random(3, 2, 16, seed=1)
    expected = KERNELS.attend(batch_of([text], shape), query, 0, shape, 0)
    text.cache.data[:, :, 301] = math.nan
    found = KERNELS.attend(batch_of([text], shape), query, 0, shape, 0)
    assert torch.equal(found[[0, 2]], expected[[0, 2]]) and found[1].isnan().any()


def layer_of(
    heads: int, kv_heads: int, width: int, hidden: int, inner: int, norms: bool
) -> LayerWeights:
    more = (heads + 2 * kv_heads) * width
    return LayerWeights(
        qkv=Packed(random(more, hidden, seed=1) / 8),
        out=Packed(random(hidden, heads * width, seed=2) / 8),
        gate_up=Packed(random(2 * inner, hidden, seed=3) / 8),
        down=Packed(random(hidden, inner, seed=4) / 8),
        norm=1 + random(hidden, seed=5) / 8,
        mlp_norm=1 + random(hidden, seed=6) / 8,
        qkv_bias=random(more, seed=7),
        query_norm=1 + random(width, seed=8) / 8 if norms else None,
        key_norm=1 + random(width, seed=9) / 8 if norms else None,
    )


@pytest.mark.parametrize("block", ["usual", "switched", "parallel"])
def test_passes_are_the_torch_backends_and_recorded_ones_serve_texts_as_they_grow(
    block: str,
) -> None:
    """A layer with all kernels: the states, queries and features of torch; and one graph's buffers
    for a text of three lengths and for two texts, byte by byte as passes that are not recorded."""
    backend = CudaBackend(CPU, KERNELS, library)
    eager = CudaBackend(CPU, KERNELS, library)
    eager.records = False
    shape, layer = shape_of(3, 1, 16), layer_of(3, 1, 16, 64, 96, block == "usual")
    shape = replace(shape, parallel=block == "parallel")
    if block == "switched":
        shape = replace(shape, cap=2.0, residual=0.7, gelu=True, whole_norms=True)
        norms = {"query_norm": random(48, seed=3), "key_norm": random(16, seed=4)}
        behind = {"out_norm": random(64, seed=5), "down_norm": random(64, seed=6)}
        layer = replace(layer, mlp_norm=None, rope=1, window=9, **norms, **behind)
    for each in (backend, eager):
        for weight in layer.packed():
            each.pack(weight.data)
    bodies: list[Any] = [each.body(shape, [layer]) for each in (backend, eager, TORCH)]
    for before, parents in ((7, [-1]), (CHUNK + 3, [-1, 0, 0]), (2 * CHUNK - 1, [-1, 0])):
        found = []
        for each, body in zip((backend, eager, TORCH), bodies, strict=True):
            texts = [
                segment(before, len(parents), parents, 1, 16),
                segment(20, 1, [-1], 1, 16, seed=4),
            ]
            batch: Any = each.batch(texts, shape)
            count = len(parents) + 1
            rows = len(batch.tokens)
            states, angles = random(16, 64)[:rows], random(2, 16, 8)[:, :rows]
            taps = Taps((0, 1), states.new_empty(2, rows, 64))
            queries = each.layers(body, states, angles.cos(), angles.sin(), batch, True, taps)
            found.append((states[:count], torch.cat(queries, 2), taps.states[:, :count]))
        for one, same, other in zip(*found, strict=True):
            assert torch.equal(one, same)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert len(bodies[0].native._kept) == 1
