"""Caches over several devices hold, layer by layer, what one over all layers holds."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.kv.full import FullCache
from tokenswift.kv.select import select
from tokenswift.kv.sparse import SparseCache
from tokenswift.kv.split import SplitCache, SplitSparse, places_of

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH, ROOM = 4, 2, 6, 64
DEVICES = [CPU, torch.device("cpu", 0), CPU, torch.device("cpu", 1)]


def both(capacity: int = ROOM) -> tuple[FullCache, SplitCache]:
    """An empty cache, and one whose layers are split 0 and 2, 1, 3."""
    found, places = places_of(DEVICES)
    assert found == [DEVICES[0], DEVICES[1], DEVICES[3]] and places == [(0, 0), (1, 0), (0, 1), (2, 0)]
    counts = [sum(part == number for part, _ in places) for number in range(len(found))]
    parts = [FullCache(count, HEADS, WIDTH, capacity, torch.float32, CPU) for count in counts]
    return FullCache(LAYERS, HEADS, WIDTH, capacity, torch.float32, CPU), SplitCache(parts, places)


def write(
    caches: tuple[FullCache, SplitCache] | tuple[SparseCache, SplitSparse], rows: int, seed: int
) -> None:
    """The same entries into both, as a pass over all layers writes them."""
    made = torch.randn(2 * LAYERS, 1, HEADS, rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    for layer in range(LAYERS):
        results = [cache.update(made[2 * layer], made[2 * layer + 1], layer) for cache in caches]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def entries(cache: SplitSparse, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's entries and their positions."""
    _, part, own = cache.at(layer)
    return part.data[2 * own : 2 * own + 2, :, : part.length], part.positions[own, :, : part.filled]


def test_the_full_cache() -> None:
    one, split = caches = both()
    for seed, (rows, kept) in enumerate([(20, tuple(range(20))), (5, (0, 2, 4)), (3, (0,))]):
        write(caches, rows, seed)
        for cache in caches:
            cache.commit(kept)
    assert split.length == one.length == split.get_seq_length() == 24 and split.nbytes == one.nbytes
    for layer in range(LAYERS):
        assert torch.equal(split.keys(layer), one.keys(layer))
    copies = one.fork(40, 10), split.fork(40, 10)
    write(caches, 4, 9)
    for layer in range(LAYERS):
        assert torch.equal(copies[1].keys(layer), one.keys(layer)[:, :10])
    assert copies[1].capacity == 40 and split.capacity == ROOM and split.ordered
    split.clear()
    assert not any(split.keys(layer).any() for layer in range(LAYERS)) and split.prefault(1.0)


def test_the_sparse_cache() -> None:
    one, split = caches = both()
    write(caches, 40, 1)
    for cache in caches:
        cache.commit(tuple(range(40)))
    queries = [torch.randn(2 * HEADS, 1, WIDTH) for _ in range(LAYERS)]
    parts = SparseCache(one, 16, 4, 8), SplitSparse(split, 16, 4, 8)
    assert parts[1].exhausted
    for full, sparse in ((one, parts[0]), (split, parts[1])):
        sparse.load(full, select("important", full, queries, 0, [None] * LAYERS, 16, 4))  # type: ignore[arg-type]
    write(parts, 3, 2)
    for sparse in parts:
        sparse.grow(3)
    write(parts, 2, 3)
    for sparse in parts:
        sparse.rewind(2)
        sparse.settle(2, 40)
    write(caches, 4, 4)
    for full, sparse in ((one, parts[0]), (split, parts[1])):
        full.commit((0, 1, 3))
        sparse.append(full, 40, 43)  # type: ignore[arg-type]
        origin = sparse.first_keys()
        sparse.turn_sinks(5, torch.tensor([1.0, 0.1, 0.01]), origin)  # type: ignore[arg-type]
        sparse.turn_window(-3, torch.tensor([1.0, 0.1, 0.01]))
    for name in ("length", "filled", "drafted", "replaced", "selections", "exhausted", "ordered", "budget"):
        assert getattr(parts[0], name) == getattr(parts[1], name)
    for layer in range(LAYERS):
        found, positions = entries(parts[1], layer)
        assert torch.equal(found, parts[0].data[2 * layer : 2 * layer + 2, :, : parts[0].length])
        assert torch.equal(positions, parts[0].positions[layer, :, : parts[0].filled])


def test_a_text_that_fits_is_taken_whole() -> None:
    one, split = caches = both()
    write(caches, 10, 1)
    for cache in caches:
        cache.commit(tuple(range(10)))
    sparse = SplitSparse(split, 16, 4, 8)
    sparse.load(split, select("recent", split, [], 0, [None] * LAYERS, 16, 4))  # type: ignore[arg-type]
    for layer in range(LAYERS):
        assert torch.equal(entries(sparse, layer)[0][0], one.keys(layer))
