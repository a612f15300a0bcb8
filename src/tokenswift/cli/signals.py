"""Ctrl-C, SIGTERM and a closed terminal: the step is finished first; a second signal ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

#: signal → how the error line begins
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Interrupted(KeyboardInterrupt):
    """A signal ended the run between two steps.

    Attributes:
        code: the exit code, 128 + the signal's number.
        word: how the error line begins.
    """

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.number, self.code = number, 128 + number
        self.word = WORDS[signal.Signals(number)]


class Signals:
    """While entered, signals set a flag that :meth:`check` raises; before the first check they raise at once.

    A signal that is ignored (``nohup``, background jobs of a shell) stays ignored. Outside the main thread
    nothing is changed.

    Args:
        leave: what a second signal does with the exit code; by default it ends the process.

    Attributes:
        number: the signal that came, 0 when none did.
    """

    def __init__(self, leave: Callable[[int], Any] = os._exit) -> None:
        self.number = 0
        self._leave = leave
        self._stepping = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in WORDS:
            if signal.getsignal(number) in (signal.SIG_IGN, None):
                continue
            try:
                self._before[number] = signal.signal(number, self._take)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
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
            self._leave(128 + number)
            return
        self.number = number
        if not self._stepping:
            raise Interrupted(number)
