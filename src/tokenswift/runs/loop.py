"""The loop guard: notices that a text has begun to repeat itself, at a small and constant cost per token.

A *pattern* is what vLLM's ``repetition_detection`` calls by that name: the newest ``size · count`` tokens are
``count`` copies of ``size`` tokens. For every size the guard keeps how many of the newest tokens equal the
one ``size`` places before; a few vector operations per token keep all of them. Short patterns are common in
sound text (dots, rules of tables, rows of zeros), so the copies must also make up ``min_tokens`` tokens.
"""

from __future__ import annotations

import numpy as np

from tokenswift.types import Loop

MOST, COPIES, TOKENS = 512, 3, 160  # tokens of a pattern at most; copies of it, and tokens that these make up


class LoopGuard:
    """Watches new tokens.

    Attributes:
        loop: the loop that the text is in, None while there is none.
        first: the first loop ever seen.
    """

    def __init__(self) -> None:
        sizes = np.arange(1, MOST + 1)
        self._need = np.maximum(sizes * (COPIES - 1), TOKENS - sizes)
        self._equal = np.zeros(MOST, dtype=np.int64)  # by size: newest tokens equal to those before
        self._newest = np.full(MOST, -1, dtype=np.int64)  # the newest token first
        self.count = 0
        self.loop: Loop | None = None
        self.first: Loop | None = None

    def push(self, token: int) -> bool:
        """Take a token; True when a loop becomes certain with it."""
        self._equal += 1
        self._equal *= self._newest == token
        self._newest[1:] = self._newest[:-1]
        self._newest[0] = token
        self.count += 1
        found = np.flatnonzero(self._equal >= self._need)
        if not len(found):
            self.loop = None
            return False
        size = int(found[0]) + 1
        span = int(self._equal[found[0]]) + size
        new = self.loop is None
        self.loop = Loop(self.count - span, size, span)
        self.first = self.first or self.loop
        return new
