"""Tokens to text, in complete characters, with stop strings; and detection of loops.

The text of a token can depend on the tokens before it (a character's bytes may be split over
tokens, and some tokenizers drop the first space). So a token is decoded together with the few
before it, and the new text is what it adds: the cost of a token does not grow with the length of
    the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenswift.types import InputError, Loop

REPLACEMENT = "\ufffd"  # stands for bytes that are no complete character (yet)
# tokens without a complete character after which the bytes, which are no UTF-8, are released
MAX_WAIT = 16
MOST, COPIES, TOKENS = 512, 3, 160  # longest pattern, least copies, least tokens in all copies


class TextStream:
    """Turns tokens into text as they come; stops at the first stop string.

    Args:
        tokenizer: a transformers tokenizer; None makes all text "".
        stop: strings that end the text. The text is cut before the one that is completed first.
    Raises:
        InputError: stop strings without a tokenizer.

    Attributes:
        stop: the stop strings.
        may_stop: whether a stop string may end the text yet.
        stopped: True once a stop string was completed.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        if stop and tokenizer is None:
            raise InputError(
                f"stop is {stop[0]!r}, but the model came without a tokenizer; valid: none"
            )
        self._tokenizer = tokenizer
        self.stop = tuple(stop)
        self._window: list[
            int
        ] = []  # newest tokens: some whose text is released, then those still waiting
        self._shown = ""  # the released part of the window's text
        self._waiting = 0  # tokens since the window's text was last released in full
        self._held = ""  # text that may be the beginning of a stop string
        self.may_stop = True
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that it releases: complete characters that cannot belong to
        a stop string. After a stop string, always ""."""
        if self.stopped or self._tokenizer is None:
            return ""
        return self._release(self._decode(token))

    def finish(self) -> str:
        """Returns the text still held back at the end, without an incomplete character."""
        if self.stopped or self._tokenizer is None:
            return ""
        rest = self._text(self._window)[len(self._shown) :]
        if self._waiting:
            rest = rest.rstrip(REPLACEMENT)
        text, self._held = self._held + rest, ""
        place = self._find(text)
        if place is not None:
            self.stopped = True
            text = text[:place]
        return text

    def _decode(self, token: int) -> str:
        """The new complete characters with ``token``."""
        self._window.append(token)
        self._waiting += 1
        text = sure = self._text(self._window)
        if text.endswith(REPLACEMENT):  # only the last character can still change
            sure = text[:-1] if self._waiting > MAX_WAIT else ""
        new = sure[len(self._shown) :]
        if new:
            self._shown = sure
        if sure == text:
            newest, self._waiting = self._window[-self._waiting :], 0
            if text := self._text(newest):  # on which the next token's can depend
                self._window, self._shown = newest, text
        return new

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _find(self, text: str) -> int | None:
        """Where the stop string that is completed first begins; None: there is none, or none may
        end the text."""
        if not self.may_stop:
            return None
        ends = [(place + len(s), place) for s in self.stop if (place := text.find(s)) >= 0]
        return min(ends)[1] if ends else None

    def _release(self, new: str) -> str:
        """Release the text that cannot belong to a stop string any more."""
        if not self.stop:
            return new
        text = self._held + new
        place = self._find(text)
        if place is not None:
            self.stopped, self._held = True, ""
            return text[:place]
        keep = 0
        for length in range(1, min(len(text), max(map(len, self.stop)) - 1) + 1):
            if any(s.startswith(text[-length:]) for s in self.stop):
                keep = length
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


class LoopGuard:
    """Detects that a text repeats itself, at a small and constant cost per token.

    A *pattern*, as in vLLM's ``repetition_detection``: the newest ``size · count`` tokens are
        ``count``
    copies of ``size`` tokens. For every size, the guard counts how many of the newest tokens equal
    the one ``size`` places before, by a few vector operations per token. Short patterns are common
    in normal text (dots, rules of tables, rows of zeros), so the copies must also add up to
    ``TOKENS`` tokens.

    Attributes:
        loop: the current loop; None: there is none.
        first: the first loop of the text; None: there was none.
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
        """Add a token; returns whether a loop is first detected with it."""
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
