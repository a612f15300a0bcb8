"""The n-gram table against a plain recount of the text."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

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
