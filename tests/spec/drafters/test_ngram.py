"""The n-gram table against a plain recount of the text."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenswift.spec.drafters import lookup
from tokenswift.spec.drafters.lookup import NgramTable

TEXT = st.lists(st.integers(0, 3), max_size=60)


def recount(text: list[int], delay: int, length: int, token: int, k: int):
    """Count from scratch: n-grams wholly older than the newest ``delay`` tokens."""
    old = text[: len(text) - delay] if delay else text
    counts: Counter[tuple[int, ...]] = Counter()
    last: dict[tuple[int, ...], int] = {}
    for i in range(len(old) - length + 1):
        if old[i] == token:
            gram = tuple(old[i + 1 : i + length])
            counts[gram] += 1
            last[gram] = i
    order = sorted(counts, key=lambda gram: (-counts[gram], -last[gram]))
    return [(gram, counts[gram]) for gram in order[:k]]


@given(
    st.lists(st.tuples(TEXT, st.lists(st.integers(0, 3), max_size=3)), max_size=6),
    st.integers(0, 30),
    st.integers(2, 5),
    st.integers(0, 12),
)
@settings(max_examples=200, deadline=None)
def test_equals_a_recount_whenever_it_is_asked(chunks, delay: int, length: int, k: int) -> None:
    table = NgramTable(delay, length)
    text: list[int] = []
    for chunk, asked in chunks:
        table.extend(chunk)
        text.extend(chunk)
        for token in asked:
            assert table.lookup(token, k) == recount(text, max(0, min(delay, len(text))), length, token, k)
    for token in range(4):
        assert table.lookup(token, k) == recount(text, min(delay, len(text)), length, token, k)


def noisy_text(length: int, seed: int = 0) -> list[int]:
    """Token 0 followed by some of 1,000 triples, Zipf-like: far more n-grams than the kept set."""
    generator = random.Random(seed)
    text: list[int] = []
    while len(text) < length:
        n = int(1000 ** generator.random())
        text += [0, n % 10 + 1, n // 10 % 10 + 1, n // 100 + 1]
    return text


@pytest.mark.parametrize("asking", [1, 7, 1000, 10**9])
def test_pruning_is_exact_and_independent_of_lookups(asking: int, monkeypatch) -> None:
    """More n-grams than the candidate set holds: still the exact ranking, however often asked."""
    monkeypatch.setattr(lookup, "_BEST", 8)
    text = noisy_text(6000)
    table = NgramTable(16)
    for step, start in enumerate(range(0, len(text), 6)):
        table.extend(text[start : start + 6])
        if step % asking == 0:
            table.lookup(0, 5)
    entry_sizes = [len(entry.top) for entry in table._entries.values()]
    for k in (1, 8, 9, 50):  # 9 and 50 are more than the set promises to hold
        assert table.lookup(0, k) == recount(text, 16, 4, 0, k)
    assert len(table._entries[0].counts) > 100
    assert all(size < 16 for size in entry_sizes) and len(table._entries[0].top) < 16
