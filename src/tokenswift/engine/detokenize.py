"""What watches new tokens as they come: they become text in complete characters, which may end by a stop
string, and a text that repeats itself is noticed.

The text of a token can depend on its left neighbours (a character's bytes may be split over tokens, and
some tokenizers drop the first space), so a token is decoded together with the tokens before it that were
decoded last: what the longer piece adds is the new text. So the cost of a token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenswift.types import InputError, Loop

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no complete character (yet)
MAX_WAIT = 16  # tokens; a longer run without a complete character is no UTF-8 and comes out as it is
MOST, COPIES, TOKENS = 512, 3, 160  # tokens of a pattern at most; copies of it, and tokens that these make up


class TextStream:
    """Turns tokens into text as they come; stops at the first stop string.

    Args:
        tokenizer: a transformers tokenizer; None makes all text "".
        stop: strings that end the text. The text is cut before the one that is completed first.
    Raises:
        InputError: stop strings without a tokenizer.

    Attributes:
        stop: the stop strings.
        may_stop: whether a stop string that is completed now ends the text.
        stopped: True once a stop string was completed.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        if stop and tokenizer is None:
            raise InputError(f"stop is {stop[0]!r}, but the model came without a tokenizer; valid: none")
        self._tokenizer = tokenizer
        self.stop = tuple(stop)
        self._window: list[int] = []  # newest tokens: some whose text is out, then those that wait
        self._shown = ""  # the part of the window's text that is out
        self._waiting = 0  # tokens since the window's text was out completely
        self._held = ""  # text that may begin a stop string
        self.may_stop = True
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; the text that is certain by now (complete characters, no stop string). Nothing comes
        after a stop string."""
        if self.stopped or self._tokenizer is None:
            return ""
        return self._release(self._decode(token))

    def finish(self) -> str:
        """The rest of the text: what was held back (nothing after a stop string), but no part of a character
        whose bytes are not all there."""
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
        """New text with ``token``: complete characters only."""
        self._window.append(token)
        self._waiting += 1
        text = sure = self._text(self._window)
        if text.endswith(REPLACEMENT):  # only the last character can still change
            sure = text[:-1] if self._waiting > MAX_WAIT else ""
        new = sure[len(self._shown) :]
        if new:
            self._shown = sure
        if sure == text:
            self._slide()
        return new

    def _slide(self) -> None:
        """Leave the newest tokens alone in the window, where they have text: that of the next ones can depend
        on it."""
        newest = self._window[-self._waiting :]
        self._waiting = 0
        if text := self._text(newest):
            self._window, self._shown = newest, text

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _find(self, text: str) -> int | None:
        """Where the first stop string to be completed begins; None where none may end the text."""
        if not self.may_stop:
            return None
        ends = [(place + len(s), place) for s in self.stop if (place := text.find(s)) >= 0]
        return min(ends)[1] if ends else None

    def _release(self, new: str) -> str:
        """Pass on what cannot belong to a stop string any more."""
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
    """Notices that a text has begun to repeat itself, at a small and constant cost per token.

    A *pattern* is what vLLM's ``repetition_detection`` calls by that name: the newest ``size · count`` tokens
    are ``count`` copies of ``size`` tokens. For every size the guard keeps how many of the newest tokens
    equal the one ``size`` places before; a few vector operations per token keep all of them. Short patterns
    are common in sound text (dots, rules of tables, rows of zeros), so the copies must also make up
    ``TOKENS`` tokens.

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
