"""The caller's handle on a request that runs with others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from typing import Literal, TypeAlias

from tokenswift.checks import check_callback
from tokenswift.engine.failures import without_frames
from tokenswift.engine.sequence import Sequence
from tokenswift.types import Generation, InputError, Step

#: waiting for memory or its turn; its prompt is prefilled; it decodes
TicketState: TypeAlias = Literal["waiting", "reading", "running"]
#: a step; None at the end of the sequence; or the exception that ended it
Event: TypeAlias = "Step | Exception | None"


class Ticket:
    """The caller's handle on a submitted request, made by `Scheduler.submit`; usable from any
    thread.

    Each step is delivered once: by `steps`, by ``async for step in ticket``, or to the callback of
    `on_event`.

    Attributes:
        sequence: the sequence, until it is over.
        state: "waiting" (for memory), "reading" (prefill) or "running" (decoding).
        is_cancelled: whether `cancel` was called.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.state: TicketState = "waiting"
        self.is_cancelled = False
        self._events: deque[Event] = deque()
        self._lock = Lock()
        self._callback: Callable[[Event], object] | None = None
        self._done = Future[Generation | None]()

    def steps(self) -> Iterator[Step]:
        """The steps as they happen; blocks until the next.

        Raises:
            Exception: the error that ended the sequence, after its last step.
        """
        events = SimpleQueue[Event]()
        self._follow(events.put)
        while isinstance(event := events.get(), Step):
            yield event
        if event is not None:
            raise event

    async def __aiter__(self) -> AsyncIterator[Step]:
        """The steps as they happen, for asynchronous code; leaving the loop cancels the request.

        Raises:
            Exception: the error that ended the sequence, after its last step.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def tell(event: Event) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._follow(tell)
        try:
            while isinstance(event := await events.get(), Step):
                yield event
        finally:
            self.cancel()
        if event is not None:
            raise event

    def _follow(self, callback: Callable[[Event], object]) -> None:
        """`on_event`; the last event is repeated if another consumer has had it, or is having it
        now."""
        self.on_event(callback)
        if self.is_over:
            error = self._done.exception()
            callback(error if isinstance(error, Exception) else None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, ``timeout`` seconds at most; returns whether it is over."""
        return not wait([self._done], timeout).not_done

    @property
    def is_over(self) -> bool:
        """Whether the sequence has ended, failed or was cancelled."""
        return self._done.done()

    @property
    def result(self) -> Generation:
        """The generation; a cancelled one has the tokens so far, and the ``finish_reason``
        "cancelled".

        Raises:
            InputError: it is not over yet.
            Exception: the error that ended it.
        """
        generation = self._done.result() if self.is_over else None
        if generation is None:
            raise InputError(
                "ticket.result is not available before the end; valid: after ticket.wait()"
            )
        return generation

    def cancel(self) -> None:
        """End it after the current step or draft pass; its journal stays and can be resumed."""
        self.is_cancelled = True

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Call ``callback(step)`` for each step, and at the end ``callback(None)``, or
        ``callback(exception)`` after an error: from the scheduler's thread, but for past events
        from the caller's. A callback that raises ends the sequence."""
        check_callback("callback", callback)
        while True:
            with self._lock:
                if not self._events:
                    self._callback = callback
                    return
                event = self._events.popleft()
            callback(event)

    def tell(self, event: Event, result: Generation | None = None) -> None:
        """Deliver an event. The last one, no `Step`, sets `is_over` before it is passed on; an
        error is kept without what its frames hold."""
        if isinstance(event, BaseException):
            without_frames(event)
        with self._lock:
            callback = self._callback
            if callback is None:
                self._events.append(event)
            if not isinstance(event, Step):
                del self.sequence  # frees its memory
                if event is None:
                    self._done.set_result(result)
                else:
                    self._done.set_exception(event)
        if callback is not None:
            callback(event)
