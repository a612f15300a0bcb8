"""Signals, and what is said of a run that one of them or an error ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from tokenswift.files import line_of
from tokenswift.types import InputError, RunError

#: what `signal.signal` takes and gives back
Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | signal.Handlers | None"

#: words of torch's and the system's errors when memory ran out
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "Unable to allocate",
)


#: signal → how the error line begins
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Interrupted(KeyboardInterrupt):
    """A signal ended the run between two steps.

    Args:
        number: the signal's.
        what_is_kept: in words.

    Attributes:
        number: the signal's.
        code: the exit code, 128 + that number.
    """

    def __init__(self, number: int, what_is_kept: str = "") -> None:
        parts = (WORDS[signal.Signals(number)], what_is_kept)
        super().__init__("; ".join(filter(None, parts)))
        self.number = number
        self.code = 128 + number


class Signals:
    """Ctrl-C, SIGTERM and a closed terminal: while entered, signals set a flag that :meth:`check`
    raises, so that the step is finished first; before the first check they raise at once, and a
    second one ends at once.

    A signal that is ignored (``nohup``, background jobs of a shell) stays ignored.

    Attributes:
        number: the signal that came, 0 when none did.
    """

    def __init__(self) -> None:
        self.number = 0
        self._stepping = False
        self._earlier_handlers: dict[int, Handler] = {}

    def __enter__(self) -> Signals:
        for number in WORDS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._earlier_handlers[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Called after each step.

        Raises:
            Interrupted: a signal has come.
        """
        self._stepping = True
        if self.number:
            raise Interrupted(self.number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        if not self._stepping:
            raise Interrupted(number)


def reason(error: BaseException) -> str:
    """Why a run failed, in one line."""
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return "out of memory"
    if isinstance(error, OSError):
        return ": ".join(filter(None, (error.filename, line_of(error))))
    return f"the run failed ({type(error).__name__}: {line_of(error)}); --debug shows where"


@contextmanager
def saying_what_is_kept(what_is_kept: Callable[[], str]) -> Iterator[Signals]:
    """Hear signals inside; whatever ends the block early says what is kept.

    Args:
        what_is_kept: says so in words, when it is called.
    Raises:
        Interrupted: by a signal.
        RunError: of anything else but bad input and a pipe that is closed.
    """
    with Signals() as signals:
        try:
            yield signals
        except InputError:
            raise
        except (KeyboardInterrupt, Exception) as error:
            # a terminal that hung up takes no text: its error comes after the signal
            if signals.number or isinstance(error, KeyboardInterrupt):
                raise Interrupted(signals.number or signal.SIGINT, what_is_kept()) from None
            if isinstance(error, BrokenPipeError) or "kept" in str(error):
                raise
            raise RunError(f"{reason(error)}; {what_is_kept()}") from error
