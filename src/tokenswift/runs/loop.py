"""The loop guard: notices that a text has begun to repeat itself, at a small and constant cost per token.

A *pattern* is what vLLM's ``repetition_detection`` calls by that name: the newest ``size · count`` tokens are
``count`` copies of ``size`` tokens. For every size the guard keeps how many of the newest tokens equal the
one ``size`` places before; a few vector operations per token keep all of them. Short patterns are common in
sound text (dots, rules of tables, rows of zeros), so the copies must also make up ``min_tokens`` tokens.

A second sign depends on what was drafted, so it is only ever reported: nearly all that n-grams of the text
could give was accepted, over a window (a text that repeats itself with small changes).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tokenswift.types import Loop, Step

MOST, COPIES, TOKENS = 512, 3, 160  # tokens of a pattern at most; copies of it, and tokens that these make up
REACH = MOST + MOST * COPIES  # tokens that decide whether the next one ends a loop
WINDOW, SHARE, LENGTH = 512, 0.95, 3.0  # tokens, β and tokens a step of the second sign


class LoopGuard:
    """Watches new tokens.

    Attributes:
        loop: the loop that the text is in, None while there is none.
        first: the first loop ever seen.
    """

    def __init__(self) -> None:
        sizes = np.arange(1, MOST + 1)
        self._need = np.maximum(sizes * (COPIES - 1), TOKENS - sizes)
        self._least = int(self._need.min())
        self._equal = np.zeros(len(sizes), dtype=np.int64)  # by size: newest tokens equal to those before
        self._room = 4 * MOST + 1024
        self._tokens = np.full(self._room, -1, dtype=np.int64)
        self._end = MOST  # place of the next token in the buffer; before it, those behind
        self.count = 0
        self.loop: Loop | None = None
        self.first: Loop | None = None
        self._steps: deque[tuple[int, int, int]] = deque()
        self._sums = [0, 0, 0]

    def push(self, token: int) -> bool:
        """Take a token; True when a loop becomes certain with it."""
        if self._end == self._room:
            kept = self._tokens[-MOST:].copy()
            self._tokens[: len(kept)] = kept
            self._end = len(kept)
        past = self._tokens[self._end - MOST : self._end]
        self._equal += 1
        self._equal *= past[::-1] == token
        self._tokens[self._end] = token
        self._end += 1
        self.count += 1
        if self._equal.max() < self._least:
            self.loop = None
            return False
        found = np.flatnonzero(self._equal >= self._need)
        if not len(found):
            self.loop = None
            return False
        size = int(found[0]) + 1
        span = int(self._equal[found[0]]) + size
        new = self.loop is None
        self.loop = Loop(self.count - span, size, span, "pattern")
        if self.first is None:
            self.first = self.loop
        return new

    def restore(self, tokens: list[int], first: Loop | None) -> None:
        """Go on after ``tokens``, all that were pushed before; a loop that was seen is not reported anew."""
        newest = tokens[-REACH:]
        self.count = len(tokens) - len(newest)
        for token in newest:
            self.push(token)
        self.first = first

    def observe(self, step: Step) -> bool:
        """Take a step's figures (its tokens are pushed on their own); True at the second sign."""
        entry = (len(step.token_ids), step.gamma, step.ngram_accepted)
        self._steps.append(entry)
        for i, value in enumerate(entry):
            self._sums[i] += value
        while self._sums[0] - self._steps[0][0] >= WINDOW:
            for i, value in enumerate(self._steps.popleft()):
                self._sums[i] -= value
        tokens, gamma, accepted = self._sums
        if self.first is not None or tokens < WINDOW or tokens < LENGTH * len(self._steps):
            return False
        if accepted < SHARE * gamma:
            return False
        self.first = Loop(self.count - tokens, 0, tokens, "n-grams")
        return True
