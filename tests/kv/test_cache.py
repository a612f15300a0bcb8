"""The full cache's commit; the sparse cache's selections, ring and draft rows."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenswift.kv.cache import FullCache, Tail
from tokenswift.kv.entries import Entries
from tokenswift.kv.sparse import SparseCache, select

CPU = torch.device("cpu")
LAYERS = 2
HEADS = 2
WIDTH = 4


def _fill(cache: FullCache, count: int, mark: float = 0.0) -> None:
    """Write a pass of ``count`` rows; every row's entries carry a value of their own."""
    for layer in range(LAYERS):
        rows = torch.arange(count, dtype=torch.float32) + cache.length + mark + 1000 * layer
        entry = rows[None, None, :, None].expand(1, HEADS, count, WIDTH)
        cache.update(entry, -entry, layer)


def _full(length: int, capacity: int = 64) -> FullCache:
    cache = FullCache(Entries(LAYERS, HEADS, WIDTH, capacity, torch.float32, CPU))
    _fill(cache, length)
    cache.commit(tuple(range(length)))
    return cache


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n)))))
def test_commit_compacts_the_accepted_rows(case: tuple[int, set[int]]) -> None:
    rows, accepted = case
    cache = _full(5)
    _fill(cache, rows + 1, mark=100)
    nodes = (0, *sorted(accepted))
    cache.commit(nodes)
    assert cache.length == 5 + len(nodes)
    expected = [0, 1, 2, 3, 4] + [105 + node for node in nodes]
    for layer in range(LAYERS):
        keys = cache.data[2 * layer, :, : cache.length, 0]
        assert keys.tolist() == [[value + 1000 * layer for value in expected]] * HEADS
        assert torch.equal(cache.data[2 * layer + 1, :, : cache.length, 0], -keys)


def test_a_fork_shares_nothing() -> None:
    first = _full(3)
    second = first.fork(5)
    assert (second.length, second.capacity) == (3, 5)
    assert torch.equal(second.data[:, :, :3], first.data[:, :, :3])
    _fill(second, 2)
    second.commit((1,))
    second.data.fill_(9.0)
    assert first.length == 3
    assert second.length == 4
    assert torch.equal(first.data[:, :, :3], _full(3).data[:, :, :3])
    with pytest.raises(ValueError, match="capacity is 2; 3 tokens are to be copied"):
        first.fork(2)


def _queries(rows: int = 1, seed: int = 0) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(2 * HEADS, rows, WIDTH, generator=noise) for _ in range(LAYERS)]


def _random_full(length: int, capacity: int = 64) -> FullCache:
    cache = FullCache(Entries(LAYERS, HEADS, WIDTH, capacity, torch.float32, CPU))
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(3)))
    cache._length = length
    return cache


def _sparse(full: FullCache, budget: int, sinks: int, scratch: int = 1) -> SparseCache:
    return SparseCache(full, budget, sinks, scratch)


def _select(
    sparse: SparseCache,
    full: FullCache,
    queries: list[torch.Tensor],
    row: int,
    policy: str = "important",
    windows: tuple[int | None, ...] = (None,) * LAYERS,
    chunk: int = 4,
) -> None:
    chosen = select(
        policy,
        full,
        queries,
        row=row,
        windows=list(windows),
        budget=sparse.budget,
        sinks=sparse.sinks,
        chunk=chunk,
    )
    sparse.load(full, chosen)


def test_selection_is_sinks_plus_the_most_important_positions() -> None:
    full = _random_full(40)
    sparse = _sparse(full, budget=12, sinks=3)
    queries = _queries(rows=2)
    assert sparse.exhausted
    _select(sparse, full, queries, row=1)
    assert not sparse.exhausted
    assert sparse.length == 12
    for layer in range(LAYERS):
        for head in range(HEADS):
            grouped = queries[layer][2 * head : 2 * head + 2, 1]
            scores: dict[int, float] = {}
            for position in range(3, 40):
                key = full.data[2 * layer, head, position]
                scores[position] = sum(float(query @ key) for query in grouped)
            best = sorted(scores, key=lambda position: (scores[position], position))[-9:]
            chosen = [0, 1, 2, *best]  # rising importance
            assert sparse.positions[layer, head].tolist() == chosen
            for part in (2 * layer, 2 * layer + 1):
                copied = sparse.data[part, head, :12]
                assert torch.equal(copied, full.data[part, head, chosen])


def test_new_tokens_replace_the_least_important_until_the_selection_is_used_up() -> None:
    full = _random_full(40)
    sparse = _sparse(full, budget=8, sinks=2)
    _select(sparse, full, _queries(), row=0)
    chosen = sparse.positions.clone()
    sparse.append(full, 37, 40)
    assert torch.equal(sparse.positions[:, :, 5:], chosen[:, :, 5:])
    assert sparse.positions[0, 0, 2:5].tolist() == [37, 38, 39]
    assert torch.equal(sparse.data[:, :, 2:5], full.data[:, :, 37:40])
    full._length = 44
    sparse.append(full, 40, 44)  # 6 places, 7 new tokens: the ring turns
    assert sparse.exhausted
    assert sparse.positions[1, 1].tolist() == [*chosen[1, 1, :2].tolist(), 43, 38, 39, 40, 41, 42]
    assert torch.equal(sparse.data[:, :, 2], full.data[:, :, 43])
    _select(sparse, full, _queries(seed=5), row=0)
    assert not sparse.exhausted
    assert sparse.selections == 2


def test_sliding_layers_select_within_their_window() -> None:
    full = _random_full(40)
    sparse = _sparse(full, budget=8, sinks=2)
    _select(sparse, full, _queries(), row=0, windows=(10, None))
    assert sparse.positions[0, :, 2:].min() >= 30
    assert sparse.positions[1, :, 2:].min() < 30


@pytest.mark.parametrize("policy", ["important", "recent", "snapkv", "chunks"])
@pytest.mark.parametrize("total", [11, 30, 40])
def test_a_budget_beyond_the_window_selects_no_more_than_the_window(
    policy: str, total: int
) -> None:
    """Sinks and the window, whatever the budget has room for; also where all of the text would
    fit."""
    full = _random_full(total)
    for budget in (13, 20, 64):
        sparse = _sparse(full, budget=budget, sinks=2)
        _select(sparse, full, _queries(rows=4), row=3, policy=policy, windows=(10, 10))
        held = sparse.positions[:, :, : sparse.filled].tolist()
        expected = sorted({0, 1, *range(total - 10, total)})
        for layer in held:
            for head in layer:
                assert sorted(head) == expected, (policy, budget)


def test_chunks_come_whole_by_the_product_with_their_mean_key() -> None:
    full = _random_full(43)
    sparse = _sparse(full, budget=20, sinks=3)
    queries = _queries()
    _select(sparse, full, queries, row=0, policy="chunks")
    grouped = queries[0][:2, 0].sum(0)
    # 4 recent tokens stay outside
    means = full.data[0, 0, 3:39].view(9, 4, WIDTH).mean(1) @ grouped
    best = sorted(sorted(range(9), key=lambda c: float(means[c]))[-3:])
    held = sparse.positions[0, 0].tolist()
    assert held[:3] == [0, 1, 2]
    assert held[-4:] == [39, 40, 41, 42]
    between = held[3:-4]
    assert set(best) <= {(position - 3) // 4 for position in between}
    assert len(between) == 13
    for chunk in best:
        assert {3 + 4 * chunk + i for i in range(4)} <= set(held)


def test_snapkv_pools_the_attention_of_the_newest_queries() -> None:
    full = _random_full(40)
    sparse = _sparse(full, budget=12, sinks=2)
    queries = _queries(rows=5)
    _select(sparse, full, queries, row=3, policy="snapkv")
    keys = full.data[2, 1, :40]  # layer 1, KV head 1: query heads 2 and 3
    mass = torch.zeros(40)
    for head in (2, 3):
        for i in range(4):
            last = 40 - 4 + i  # the query of this position sees up to itself
            scores = (keys[: last + 1] @ queries[1][head, i]) * WIDTH**-0.5
            mass[: last + 1] += scores.softmax(0)
    pooled = torch.tensor([float(mass[max(0, t - 2) : t + 3].mean()) for t in range(40)])
    best = sorted(range(2, 36), key=lambda t: float(pooled[t]))[-6:]
    assert sparse.positions[1, 1].tolist() == [0, 1, *best, 36, 37, 38, 39]


def test_draft_rows_stay_behind_the_slots_until_they_settle() -> None:
    full = _random_full(40)
    before = full.data.clone()
    sparse = _sparse(full, budget=8, sinks=2, scratch=4)
    _select(sparse, full, _queries(), row=0, policy="recent")
    for layer in range(LAYERS):
        entry = torch.arange(3.0)[None, None, :, None].expand(1, HEADS, 3, WIDTH)
        keys, values = sparse.update(entry, -entry, layer)
        assert keys.shape == values.shape == (1, HEADS, 11, WIDTH)
    sparse.grow(2)
    assert sparse.length == 10
    with pytest.raises(ValueError, match="13 rows"):
        sparse.update(torch.ones(1, HEADS, 3, WIDTH), torch.ones(1, HEADS, 3, WIDTH), 0)
    sparse.commit_drafted(2, start=40)
    assert sparse.length == 8
    assert sparse.positions[0, 0].tolist() == [0, 1, 40, 41, 36, 37, 38, 39]
    assert sparse.data[0, 0, 2:4, 0].tolist() == [0.0, 1.0]
    assert torch.equal(full.data, before)


def test_a_sparse_cache_lets_go_of_the_full_one() -> None:
    """Also where it reads layers with windows there."""
    full = FullCache(Entries(1, HEADS, WIDTH, 64, torch.float32, CPU), 40)
    full.tail = Tail(Entries(1, HEADS, WIDTH, 64, torch.float32, CPU), (None, 4))
    sparse = _sparse(full, budget=8, sinks=2)
    full_cache = ref(full)
    assert sparse.tail is full.tail
    assert sparse.tail_length == 40
    del full
    assert full_cache() is None
