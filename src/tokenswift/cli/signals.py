"""Ctrl-C, SIGTERM and a closed terminal: the step is finished first; a second signal ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Event, Thread
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
        patience: seconds that a step may continue after a signal, then the process ends: of several ranks one
            may wait for another for ever, in a call that no Python code interrupts. None: no end to it.
        last: told how the error line would be, just before that.

    Attributes:
        number: the signal that came, 0 when none did.
    """

    def __init__(
        self,
        leave: Callable[[int], Any] = os._exit,
        patience: float | None = None,
        last: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.number = 0
        self._patience, self._last = patience, last
        self._ended = Event()
        self._pipe: tuple[int, int] | None = None
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
        if self._patience is not None and self._before:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            signal.set_wakeup_fd(self._pipe[1])
            Thread(target=self._watch, args=(self._pipe[0], self._patience), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._ended.set()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])

    def _watch(self, pipe: int, patience: float) -> None:
        """End the process where a signal has not done so in time."""
        words = {int(number): word for number, word in WORDS.items()}
        with os.fdopen(pipe, "rb", buffering=0) as signals:
            while (came := signals.read(1)) and came[0] not in words:
                pass  # the system's handler writes them, whatever Python waits for
        if came and not self._ended.wait(patience):
            self._last(f"{words[came[0]]}; another rank did not answer")
            self._leave(128 + came[0])

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
