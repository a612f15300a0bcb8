"""The full cache's commit and the partial cache's selection, replacement and reselection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenswift.cache.full import FullCache
from tokenswift.cache.partial import PartialCache

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH = 2, 2, 4


def _fill(cache: FullCache, count: int, mark: float = 0.0) -> None:
    """Write a pass of ``count`` rows; every row's entries carry a value of their own."""
    for layer in range(LAYERS):
        rows = torch.arange(count, dtype=torch.float32) + cache.length + mark + 1000 * layer
        entry = rows[None, None, :, None].expand(1, HEADS, count, WIDTH)
        cache.update(entry, -entry, layer)


def _full(length: int, capacity: int = 64) -> FullCache:
    cache = FullCache(LAYERS, HEADS, WIDTH, capacity, torch.float32, CPU)
    _fill(cache, length)
    cache.commit(tuple(range(length)))
    return cache


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n)))))
def test_commit_compacts_the_accepted_rows(case: tuple[int, set[int]]) -> None:
    rows, kept = case
    cache = _full(5)
    _fill(cache, rows + 1, mark=100)
    nodes = (0, *sorted(kept))
    cache.commit(nodes)
    assert cache.length == 5 + len(nodes)
    expected = [0, 1, 2, 3, 4] + [105 + node for node in nodes]
    for layer in range(LAYERS):
        keys = cache.data[2 * layer, :, : cache.length, 0]
        assert keys.tolist() == [[value + 1000 * layer for value in expected]] * HEADS
        assert torch.equal(cache.data[2 * layer + 1, :, : cache.length, 0], -keys)


def _queries(rows: int = 1, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2 * HEADS, rows, WIDTH, generator=made) for _ in range(LAYERS)]


def _random_full(length: int, capacity: int = 64) -> FullCache:
    cache = FullCache(LAYERS, HEADS, WIDTH, capacity, torch.float32, CPU)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(3)))
    cache._length = length
    return cache


def test_selection_is_sinks_plus_the_most_important_positions() -> None:
    full = _random_full(40)
    partial = PartialCache(full, budget=12, sinks=3, scratch=1, window=[None] * LAYERS)
    queries = _queries(rows=2)
    assert partial.exhausted
    partial.select(queries, row=1)
    assert not partial.exhausted
    for layer in range(LAYERS):
        for head in range(HEADS):
            grouped = queries[layer][0, 2 * head : 2 * head + 2, 1]
            scores = [
                (sum(float(q @ full.data[2 * layer, head, t]) for q in grouped), t) for t in range(3, 40)
            ]
            best = [t for _, t in sorted(scores, reverse=True)[:9]]
            assert partial.positions[layer, head].tolist() == [0, 1, 2, *best]
            held = partial.data[2 * layer, head, :12]
            assert torch.equal(held, full.data[2 * layer, head, [0, 1, 2, *best]])
            assert torch.equal(
                partial.data[2 * layer + 1, head, :12], full.data[2 * layer + 1, head, [0, 1, 2, *best]]
            )


def test_new_tokens_replace_the_least_important_until_the_selection_is_used_up() -> None:
    full = _random_full(40)
    partial = PartialCache(full, budget=8, sinks=2, scratch=1, window=[None] * LAYERS)
    partial.select(_queries(), row=0)
    chosen = partial.positions.clone()
    full._length = 43
    partial.append(40, 43)
    assert torch.equal(partial.positions[:, :, :5], chosen[:, :, :5])
    assert partial.positions[0, 0, 5:].tolist() == [40, 41, 42]
    assert torch.equal(partial.data[:, :, 5:8], full.data[:, :, 40:43])
    full._length = 46
    partial.append(43, 46)
    assert partial.exhausted  # 6 places, 6 new tokens
    assert sorted(partial.positions[1, 1, 2:].tolist()) == [40, 41, 42, 43, 44, 45]
    partial.select(_queries(seed=5), row=0)
    assert not partial.exhausted and partial.selections == 2


def test_more_new_tokens_than_room_ask_for_a_new_selection() -> None:
    full = _random_full(40)
    partial = PartialCache(full, budget=8, sinks=2, scratch=1, window=[None] * LAYERS)
    partial.select(_queries(), row=0)
    partial.append(33, 40)
    assert partial.exhausted


def test_sliding_layers_select_within_their_window() -> None:
    full = _random_full(40)
    partial = PartialCache(full, budget=8, sinks=2, scratch=1, window=[10, None])
    partial.select(_queries(), row=0)
    assert partial.positions[0, :, 2:].min() >= 30
    assert partial.positions[1, :, 2:].min() < 30


def test_a_draft_pass_leaves_the_full_cache_alone() -> None:
    full = _random_full(40)
    before = full.data.clone()
    partial = PartialCache(full, budget=8, sinks=2, scratch=1, window=[None] * LAYERS)
    partial.select(_queries(), row=0)
    keys, values = partial.update(torch.ones(1, HEADS, 1, WIDTH), torch.zeros(1, HEADS, 1, WIDTH), 1)
    assert keys.shape == values.shape == (1, HEADS, 9, WIDTH)
    assert torch.equal(full.data, before)


def test_selection_needs_a_full_budget() -> None:
    partial = PartialCache(_random_full(7), budget=8, sinks=2, scratch=1, window=[None] * LAYERS)
    with pytest.raises(ValueError, match="7 tokens"):
        partial.select(_queries(), row=0)
