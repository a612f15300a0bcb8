"""Detection of loops: texts that repeat what they said, token by token.

A short pattern that is copied again and again is noticed within 160 tokens (`LoopGuard`). Under a
penalty such as the paper's, a text seldom does that, but may write the same pages again, with a
word changed here and there (`CopyGuard`).
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

import numpy as np

from tokenswift.types import Loop

MAX_PATTERN = 512  # tokens of a pattern that repeats itself
MIN_COPIES = 3  # of a pattern
MIN_REPEATED = 160  # tokens of all copies of a pattern
COPIED_RUN = 8  # tokens in a row that stood in the text before: a copy
COPIED_WINDOW = 2048  # newest tokens, of which nearly all have to be copies
COPIED_SHARE = 0.9


class LoopGuard:
    """Detects that a text repeats itself, at a small and constant cost per token.

    A *pattern*, as in vLLM's ``repetition_detection``: the newest ``size · count`` tokens are
    ``count`` copies of ``size`` tokens. For every size, the guard counts how many of the newest
    tokens equal the one ``size`` places before, by a few vector operations per token. Short
    patterns are common in normal text (dots, rules of tables, rows of zeros), so the copies must
    also add up to `MIN_REPEATED` tokens.

    Attributes:
        loop: the current loop; None: there is none.
    """

    def __init__(self) -> None:
        sizes = np.arange(1, MAX_PATTERN + 1)
        self._need = np.maximum(sizes * (MIN_COPIES - 1), MIN_REPEATED - sizes)
        # by size: newest tokens equal to those before
        self._equal = np.zeros(MAX_PATTERN, dtype=np.int64)
        self._newest = np.full(MAX_PATTERN, -1, dtype=np.int64)  # the newest token first
        self.count = 0
        self.loop: Loop | None = None

    def push(self, token: int) -> bool:
        """Add a token; returns whether a loop is first detected with it."""
        self._equal += 1
        self._equal *= self._newest == token
        self._newest[1:] = self._newest[:-1]
        self._newest[0] = token
        self.count += 1
        repeating = np.flatnonzero(self._equal >= self._need)
        if not len(repeating):
            self.loop = None
            return False
        shortest = int(repeating[0])
        size = shortest + 1
        span = int(self._equal[shortest]) + size
        is_new = self.loop is None
        self.loop = Loop(self.count - span, size, span)
        return is_new


class CopyGuard:
    """Detects that a text writes its own pages again, at a small and constant cost per token.

    A token is a *copy* if it and the `COPIED_RUN` - 1 before it stood in the text before, in this
    order and anywhere. The text is a loop while at least `COPIED_SHARE` of the newest
    `COPIED_WINDOW` tokens are copies.

    Attributes:
        loop: the current loop; None: there is none.
    """

    def __init__(self) -> None:
        self._run: deque[int] = deque(maxlen=COPIED_RUN)
        self._places: dict[int, int] = {}  # hash of a run -> the newest place where one ends
        self._distances: deque[int] = deque(maxlen=COPIED_WINDOW)  # to a token's copy; 0: none
        self._copies = 0  # among the distances
        self.count = 0
        self.loop: Loop | None = None

    def push(self, token: int) -> None:
        """Add a token."""
        self._run.append(token)
        if len(self._distances) == COPIED_WINDOW:
            self._copies -= self._distances[0] > 0
        run = hash(tuple(self._run))
        distance = self.count - self._places.get(run, self.count)
        self._places[run] = self.count
        self._distances.append(distance)
        self._copies += distance > 0
        self.count += 1
        if self._copies < COPIED_SHARE * COPIED_WINDOW:
            self.loop = None
        elif self.loop is None:
            size = median_low(distance for distance in self._distances if distance)
            start = max(0, self.count - COPIED_WINDOW - size)
            self.loop = Loop(start, size, self.count - start)
