"""A handle on a text that a scheduler runs: its steps as they come, its result, and its end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition
from typing import TypeAlias

from tokenswift.engine.request import check_callback
from tokenswift.engine.run import Run
from tokenswift.types import Generation, InputError, Step

#: a step; None: the text has ended; an exception: it has failed
Event: TypeAlias = "Step | Exception | None"

logger = logging.getLogger("tokenswift")


class Ticket:
    """A text that was asked for; may be used from any thread. Made by `Scheduler.submit`.

    Each step is given once: to `steps`, or to the callback.

    Args:
        run: what runs.
        cancel: called with the ticket when it is to be cancelled.
    """

    def __init__(self, run: Run, cancel: Callable[[Ticket], None]) -> None:
        self._ask = cancel
        self._run: Run | None = run
        self._events: deque[Event] = deque()
        self._changed = Condition()
        self._callback: Callable[[Event], object] | None = None
        self._result: Generation | None = None
        self._error: Exception | None = None

    def steps(self) -> Iterator[Step]:
        """The steps as they come; waits for the next.

        Raises:
            Exception: the text's failure, after its last step.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self.is_over)
                if not self._events:
                    return
                event = self._events.popleft()
            if isinstance(event, Exception):
                raise event
            if event is None:
                return
            yield event

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the text is over, ``timeout`` seconds at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over, timeout)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, failed or was cancelled."""
        return self._result is not None or self._error is not None

    @property
    def result(self) -> Generation:
        """The generation, once it is over; of a cancelled one what there is, its ``finish_reason``
        "cancelled".

        Raises:
            InputError: it is not over.
            Exception: its failure.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise InputError("ticket.result is not available before the end; valid: after ticket.wait()")
        return self._result

    def cancel(self) -> None:
        """End the text after the step under way, or the draft pass; a journal stays and can be gone on
        with."""
        self._ask(self)

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have ``callback(step)`` called for each step, ``callback(exception)`` when the text fails, and
        ``callback(None)`` when it ends, from the scheduler's thread; for what happened before this call,
        from the caller's. A callback that raises ends the text."""
        check_callback("callback", callback)
        while True:
            with self._changed:
                if not self._events:
                    self._callback = callback
                    return
                event = self._events.popleft()
            callback(event)

    @property
    def run(self) -> Run:
        """What is run; the scheduler's own.

        Raises:
            InputError: it is over.
        """
        if self._run is None:
            raise InputError("the ticket's text has ended; valid: ticket.result")
        return self._run

    def tell(self, event: Event, result: Generation | None = None) -> None:
        """An event. With the last one the text is over: whoever sees that it is finds that event."""
        with self._changed:
            if not isinstance(event, Step):
                self._run, self._result, self._error = None, result, event
            callback = self._callback
            if callback is None:
                self._events.append(event)
            self._changed.notify_all()
        if callback is not None:
            callback(event)

    def end(self, result: Generation | None, error: Exception | None) -> None:
        """The last event; from here on the text's memory can be had. Never raises."""
        try:
            self.tell(error, result)
        except BaseException as fault:  # nothing is left that it could end
            logger.warning("a callback failed at the end of its text (%s)", fault)
