"""Grammar masks: the tokens that a grammar allows after a context, from llguidance, along paths of
a draft tree.

A mask sets the logits of forbidden tokens to -inf before all other processing. (After penalties and
temperature would be the same, since these treat every token by itself; the filters see what is
left.) A matcher stands at one place of a text. For another path of the tree it is rolled back to
where the two paths part, so that each row gets the mask of its own path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from time import thread_time
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.types import RunError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


LEFT = "the text leaves the grammar"
SPOILT = "another text of this grammar reached llguidance's limits"
TOO_SLOW = "its masks take too long"
TOO_LONG = "a number would be too long"

#: processor time in seconds that a text's masks may take: at first, and for each of its tokens.
#: Hundreds of times what usual grammars take; some ambiguous ones take seconds a mask
TEXT_SECONDS = 5.0
TOKEN_SECONDS = 0.05
SLOW_SECONDS = 0.2  # a step's masks that took longer are slow: others do not wait for the next one
_NUMBER_TOKENS = 3  # tokens that show whether a text ends within a number
_IN_NUMBER = re.compile(rb"[0-9](\.|[eE][+-]?)?\Z")


class NoMask(RunError):
    """There is no mask.

    Args:
        position: the position whose token it would be for.
        reason: llguidance's, because of the grammar; or `LEFT`, an error of this library.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)  # what pickle makes it again from
        self.position = position
        self.reason = reason

    def __str__(self) -> str:
        return f"the grammar gives no mask for position {self.position} ({self.reason})"


@dataclass(slots=True)
class Compiled:
    """A grammar for one model.

    Attributes:
        matcher: an `llguidance.LLMatcher` at the start of a text.
        compile: makes another matcher, which shares nothing with the first.
        numbers: the grammar that bounds the digits of JSON numbers; None: it holds no JSON.
        spoilt: whether llguidance's limits were reached. Copies share automata, so that another
            text would fail at its first token.
    """

    matcher: LLMatcher
    compile: Callable[[], LLMatcher]
    numbers: Compiled | None = None
    spoilt: bool = False


class Masks:
    """The masks of one sequence.

    Args:
        compiled: the compiled grammar.
        tokenizer: its `llguidance.LLTokenizer`.
        start: length of the prompt.
        ends: ids of end-of-text tokens, which the matcher never consumes.

    Attributes:
        tokenizer, ends: the arguments.
        is_slow: whether masks took so long that others should not wait for the next one, and that
            nothing is drafted: `prepare` makes it.
    """

    def __init__(
        self, compiled: Compiled, tokenizer: LLTokenizer, start: int, ends: Sequence[int]
    ) -> None:
        self._compiled = compiled
        self.tokenizer = tokenizer
        self.ends = ends
        self._matcher = compiled.matcher.deep_copy()
        self._failure: NoMask | None = None  # set once no matcher can follow the text
        self._start = start
        self._committed = start  # length of the text that is committed
        self._path: list[int] = []  # tokens that the matcher has consumed after it
        self._masks: dict[tuple[int, ...], Tensor | NoMask | None] = {}  # by path after it
        bounds = compiled.numbers
        self._numbers = None if bounds is None else Masks(bounds, tokenizer, start, ends)
        self.is_slow = False
        self._seconds = 0.0  # processor time so far
        self._step_seconds = 0.0  # processor time since the last commit

    def prepare(self, history: list[int]) -> None:
        """Make the mask after ``history``, unless it is made, and see whether masks are still slow.
        What is wrong with it, `allowed` will raise."""
        if len(history) == self._committed and () in self._masks:
            return
        self.is_slow = False
        self._step_seconds = 0.0
        with suppress(NoMask):
            self.allowed(history, [])

    def allowed(self, history: list[int], path: Sequence[int]) -> Int[Tensor, " w"] | None:
        """The mask after ``history + path``, a bit for each token (see `rows.allowed_tokens`), on
        the CPU; None if the path leaves the grammar or the text has ended.

        Raises:
            NoMask: llguidance's limits are reached, the masks take too long, or ``history`` leaves
                the grammar.
        """
        with self._timed():
            self._commit(history)
            key = tuple(path)
            if key not in self._masks:
                self._masks[key] = self._mask(history, path)
        mask = self._masks[key]
        if isinstance(mask, NoMask):
            raise mask
        return mask

    def _mask(self, history: list[int], path: Sequence[int]) -> Tensor | NoMask | None:
        """A mask as `allowed` returns it, or what it raises."""
        position = len(history) + len(path)
        if self._seconds > TEXT_SECONDS + TOKEN_SECONDS * (self._committed - self._start):
            return NoMask(position, TOO_SLOW)
        bits = self._matcher.compute_bitmask() if self._go_to(path) else None
        error = self._error(history)
        if error is not None:
            return error
        if bits is None:
            return None
        count = -(-self.tokenizer.vocab_size // 32)  # llguidance may give one more
        words = torch.frombuffer(bytearray(bits), dtype=torch.int32, count=count)
        bound = self._digits_left(history, path)
        if bound is None:
            return words
        bounded = words & bound
        return bounded if bounded.any() or not words.any() else NoMask(position, TOO_LONG)

    def _digits_left(self, history: list[int], path: Sequence[int]) -> Tensor | None:
        """The mask of what bounds a number, where the text may end within one."""
        if self._numbers is None:
            return None
        new = [*history[max(self._start, len(history) - _NUMBER_TOKENS) :], *path]
        if not _IN_NUMBER.search(self.tokenizer.decode_bytes(new[-_NUMBER_TOKENS:])):
            return None
        try:
            return self._numbers.allowed(history, path)
        except NoMask:  # it is JSON in a form that only the grammar itself knows
            return None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the processor time of a call."""
        start = thread_time()
        try:
            yield
        finally:
            seconds = thread_time() - start
            self._seconds += seconds
            self._step_seconds += seconds
            self.is_slow |= self._step_seconds > SLOW_SECONDS

    def reach(self, history: list[int], path: Sequence[int]) -> int:
        """How many tokens of a path after ``history`` the grammar allows."""
        with self._timed():
            self._commit(history)
            self._go_to(path)
        reached = len(self._path)
        if reached < len(path) and path[reached] in self.ends:
            reached += self._matcher.is_accepting()
        return 0 if self._error(history) is not None else reached

    def forced(self, history: list[int]) -> tuple[list[int], int]:
        """The tokens of the text that the grammar forces after ``history``, with the end of text if
        it ends there, and how many of them are certain: the others could be other tokens for the
        same text."""
        with self._timed():
            return self._forced(history)

    def _forced(self, history: list[int]) -> tuple[list[int], int]:
        self._commit(history)
        self._go_to([])
        matcher = self._matcher
        tokens: list[int] = matcher.compute_ff_tokens()
        text: bytes = matcher.compute_ff_bytes()
        if self._error(history) is not None:
            return [], 0
        certain = len(tokens)
        if tokens:
            text = text[len(self.tokenizer.decode_bytes(tokens)) :]
        if text:
            tokens = [*tokens, *self.tokenizer.tokenize_bytes(text)]
        if not self._go_to(tokens):
            tokens = self._path[:]
        elif matcher.is_stopped() and len(self.ends) == 1:
            if certain == len(tokens):
                certain += 1
            tokens = [*tokens, self.ends[0]]
        return tokens, certain

    def of(
        self, history: list[int], paths: list[list[int]], positions: list[int] | None = None
    ) -> list[Int[Tensor, " w"] | None]:
        """The masks of rows; arguments as in `rows.LogitRows`. None for a row whose context is
        not fully known, or whose path leaves the grammar, so that it cannot be accepted.

        Raises:
            NoMask: see :meth:`allowed`.
        """
        masks: list[Tensor | None] = []
        for row, path in enumerate(paths):
            is_known = not positions or positions[row] == len(history) + len(path)
            masks.append(self.allowed(history, path) if is_known else None)
        return masks

    def _commit(self, history: list[int]) -> None:
        """Let the matcher follow the tokens that were committed since the last call.

        Raises:
            NoMask: they leave the grammar, or nothing can follow them.
        """
        if self._failure is not None:
            raise self._failure
        new = history[self._committed :]
        if not new:
            return
        if not self._go_to(new) and not self._begin_anew(history[self._start :]):
            reason = self._matcher.get_error() or (SPOILT if self._compiled.spoilt else LEFT)
            self._failure = NoMask(self._committed + len(self._path), one_line(reason))
            self._compiled.spoilt = True
            raise self._failure
        self._committed += len(new)
        self._path = []
        self._masks = {}
        self._step_seconds = 0.0

    def _begin_anew(self, text: list[int]) -> bool:
        """Let a matcher that is compiled anew follow the text so far; returns whether it does.

        Drafts close to llguidance's limits wear out the automata, which copies share: these refuse
        tokens that they allowed.
        """
        if self._matcher.is_error() or self._compiled.spoilt:  # why it does not follow is known
            return False
        if any(token in self.ends for token in text):
            return False
        matcher = self._compiled.compile()
        if matcher.try_consume_tokens(text) < len(text):
            return False
        self._matcher = matcher
        self._path = text[self._committed - self._start :]
        return True

    def _go_to(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of a path after the committed text, or to where the path
        leaves the grammar; returns whether it reached the end."""
        common = 0  # tokens that both paths begin with
        for consumed, wanted in zip(self._path, path, strict=False):
            if consumed != wanted:
                break
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        # the matcher consumes no end of text, and nothing follows one
        new = [*takewhile(lambda token: token not in self.ends, path[common:])]
        count = self._matcher.try_consume_tokens(new) if new else 0
        self._path += new[:count]
        return len(self._path) == len(path)

    def _error(self, history: list[int]) -> NoMask | None:
        """The matcher's error, or None. A matcher with an error is replaced, since the path may be
        a draft that is never accepted."""
        if not self._matcher.is_error():
            return None
        position = self._committed + len(self._path)
        error = NoMask(position, one_line(self._matcher.get_error()))
        self._compiled.spoilt = True
        self._matcher = self._compiled.matcher.deep_copy()
        self._path = []
        text = history[self._start : self._committed]
        if text and self._matcher.try_consume_tokens(text) < len(text):
            self._failure = error
        return error


def one_line(message: object) -> str:
    """A library's message or error, shortened to one line."""
    text = str(message).partition("\n<state>")[0].replace("<non-verbose/>", "")
    text = " ".join(text.split()).replace("NoExtensionBias", "no text is possible")
    if not text and isinstance(message, Exception):
        text = type(message).__name__
    return text if len(text) <= 240 else f"{text[:239]}…"
