"""Detection of litanies: texts that go on for ever in one form, such as "I no longer felt. I no
longer knew.", without a pattern of tokens that repeats (`LoopGuard` sees those).

A window of the newest words is looked at now and then, so a token costs next to nothing. A text is
a litany while all of this holds for three windows in a row:

- few of its words are different ones;
- their text is compressed much better than prose is;
- it consists of sentences (a table or program code does not), many of which open with the same two
  words.

The thresholds are far from anything in eight novels (docs/benchmarks.md); ``tools/litanies.py``
measures them again.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, deque
from dataclasses import dataclass

from tokenswift.types import Litany

WORDS = 300  # of a window
EVERY = 64  # tokens between two looks
MOST_TOKENS = 1024  # in which the words of a window must stand
WINDOWS = 3  # in a row that must be litanies
MOST_DISTINCT = 0.30  # share of different words
MOST_COMPRESSED = 0.30  # compressed size ÷ size
LEAST_SENTENCES = 0.4  # share of words in sentences
LEAST_REPEATED = 0.35  # share of sentences that open as one before them does
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]*_]*(?:\s+|$)")
LONGEST_WORD = 40  # characters of a word that count


@dataclass(frozen=True)
class Form:
    """The form of a window of words.

    Attributes:
        distinct: different words ÷ words.
        compressed: compressed size ÷ size of the words, with spaces between.
        sentences: share of the words that stand in sentences.
        repeated: share of the sentences that open with the two words of one before.
        opening: the commonest two words at the beginning of a sentence.
    """

    distinct: float
    compressed: float
    sentences: float
    repeated: float
    opening: str

    @property
    def is_litany(self) -> bool:
        """Whether a text of this form says little that is new."""
        return (
            self.distinct < MOST_DISTINCT
            and self.compressed < MOST_COMPRESSED
            and self.sentences > LEAST_SENTENCES
            and self.repeated > LEAST_REPEATED
        )


def form_of(text: str) -> Form:
    """The form of a text of at least one word."""
    words = [word[:LONGEST_WORD] for word in WORD.findall(text.lower())]
    plain = " ".join(words).encode()
    sentences = list(_sentences(text.lower()))
    openings = Counter(f"{words[0]} {words[1]}" for words in sentences)
    commonest = openings.most_common(1)
    return Form(
        distinct=len(set(words)) / len(words),
        compressed=len(zlib.compress(plain)) / len(plain),
        sentences=sum(map(len, sentences)) / len(words),
        repeated=1 - len(openings) / max(1, len(sentences)),
        opening=commonest[0][0] if commonest else "",
    )


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence of at least two words. Lines that end without a full stop, such as
    headings and rows of tables, are no part of the sentence behind them."""
    sentences: list[list[str]] = []
    start = 0
    for end in SENTENCE_END.finditer(text):
        line = text[start : end.start()].rpartition("\n\n")[2]
        start = end.end()
        words = [word[:LONGEST_WORD] for word in WORD.findall(line)]
        if len(words) > 1:
            sentences.append(words)
    return sentences


class LitanyGuard:
    """Detects that a text has become a litany, at a small cost per token.

    What it says depends on the text's tokens, not on how they were drafted; and, by a hair, on the
    zlib of the machine, whose versions compress a little differently.

    Attributes:
        litany: the current litany; None: there is none.
        first: the first litany of the text; None: there was none.
    """

    def __init__(self) -> None:
        self._pieces: deque[str] = deque(maxlen=MOST_TOKENS)
        self._count = 0
        self._in_a_row = 0
        self._start = 0
        self.litany: Litany | None = None
        self.first: Litany | None = None

    def push(self, piece: str) -> None:
        """Add the text of a token, which may be ""."""
        self._pieces.append(piece)
        self._count += 1
        if self._count % EVERY == 0:
            self._look()

    def _look(self) -> None:
        window = self._window()
        form = None if window is None else form_of(window[1])
        if window is None or form is None or not form.is_litany:
            self._in_a_row = 0
            self.litany = None
            return
        if self._in_a_row == 0:
            self._start = window[0]
        self._in_a_row += 1
        if self._in_a_row >= WINDOWS and self.litany is None:
            self.litany = Litany(self._start, self._count - self._start, form.opening)
            self.first = self.first or self.litany

    def _window(self) -> tuple[int, str] | None:
        """The newest `WORDS` words as they stand in the text, and the token with the first of them;
        None: there are fewer."""
        text = "".join(self._pieces)
        words = list(WORD.finditer(text))
        if len(words) < WORDS:
            return None
        place = words[-WORDS].start()
        length = len(text)
        token = self._count
        for piece in reversed(self._pieces):
            if length <= place:
                break
            length -= len(piece)
            token -= 1
        return token, text[place:]
