"""Token reutilisation: n-grams of the text so far, offered again as draft branches (paper section 3.3).

The table maps a token to the tokens that followed it. An n-gram enters only once all of it is older
than the penalty window: a younger one would be penalised and rejected.

Cost. Appending notes the position of each token that has become old enough, and no more; the n-grams
that start with a token are counted when that token is looked up. A lookup ranks a candidate set of
fewer than 2 M n-grams, however long the text is; M is 128, or what the table was made for (asked for
more than M, it looks through all). The set is exact and not an approximation: only an occurrence can
raise an n-gram's rank, and each occurrence puts its n-gram back into the set, so an n-gram that was
pruned stays below the M that were kept until it occurs again.
Results therefore depend on the text alone and never on when lookups were made.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

_BEST = 128  # the least M
_COUNT = 40  # the bits below hold the position, so that integers compare by count, then by position

Followers = tuple[int, ...]


class _Entry:
    """What is known of one first token."""

    __slots__ = ("counts", "top", "ranked", "most")

    def __init__(self, most: int) -> None:
        self.most = most  # M
        self.counts: dict[Followers, int] = {}  # followers → count and latest position in one integer
        self.top: dict[Followers, None] = {}  # a set in order of insertion; holds the M best of counts
        self.ranked: list[Followers] | None = None  # top by rank; None when out of date

    def add(self, followers: Followers, position: int) -> None:
        counts, top = self.counts, self.top
        count = counts.get(followers, 0) >> _COUNT
        counts[followers] = (count + 1 << _COUNT) + position
        top[followers] = None
        if len(top) >= 2 * self.most:
            self.top = dict.fromkeys(sorted(top, key=counts.__getitem__, reverse=True)[: self.most])

    def best(self, k: int) -> list[tuple[Followers, int]]:
        counts = self.counts
        if k > self.most:
            ranked = heapq.nlargest(k, counts, key=counts.__getitem__)
        else:
            if self.ranked is None:
                self.ranked = sorted(self.top, key=counts.__getitem__, reverse=True)
                self.top = dict.fromkeys(self.ranked)  # nearly sorted input makes the next sort cheap
            ranked = self.ranked
        return [(followers, counts[followers] >> _COUNT) for followers in ranked[:k]]


class NgramTable:
    """Counts of the n-grams of a growing text, by first token.

    Args:
        delay: at least 0; an n-gram enters once all its tokens are older than this many newest ones.
        length: n of the n-grams, at least 2: the first token and ``length - 1`` followers.
        most: lookups of up to this many n-grams cost the same however long the text is (of up to 128
            in any case); it changes no result.
    """

    def __init__(self, delay: int, length: int = 4, most: int = 0) -> None:
        if delay < 0 or length < 2:
            raise ValueError(f"delay is {delay}, length is {length}; valid: at least 0 and at least 2")
        self.delay = delay
        self.length = length
        self.most = max(_BEST, most)
        self._tokens: list[int] = []
        self._noted = 0  # n-grams that start before this position are in _pending or counted
        self._pending: defaultdict[int, list[int]] = defaultdict(list)
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        """Tokens appended so far."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text, pending = self._tokens, self._pending
        text.extend(tokens)
        ready = len(text) - self.delay - self.length + 1
        for position in range(self._noted, ready):
            pending[text[position]].append(position)
        self._noted = max(self._noted, ready)

    def lookup(self, token: int, k: int) -> list[tuple[Followers, int]]:
        """Up to k n-grams that start with ``token``: (followers, count), the most frequent first.

        Among equal counts the one that occurred last comes first.
        """
        entry = self._entries.get(token)
        fresh = self._pending.pop(token, None)
        if fresh is not None:
            if entry is None:
                entry = self._entries[token] = _Entry(self.most)
            text, length = self._tokens, self.length
            for position in fresh:
                entry.add(tuple(text[position + 1 : position + length]), position)
            entry.ranked = None
        return entry.best(k) if entry is not None and k > 0 else []
