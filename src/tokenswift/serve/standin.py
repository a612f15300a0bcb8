"""Until the scheduler is there: one text at a time, by the same interface."""

from __future__ import annotations

import queue as queues
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenswift.types import Generation, InputError, Step


class QueueFull(InputError):
    """Too many wait."""


@dataclass
class Figures:
    running: int
    waiting: int
    tokens: int
    rows: int


class Ticket:
    def __init__(self, stream: Any) -> None:
        self._stream, self._lock = stream, threading.Condition()
        self._events: list[Any] = []
        self._callbacks: list[Callable[[Any], None]] = []
        self.cancelled = False

    def _tell(self, event: Any) -> None:
        with self._lock:
            self._events.append(event)
            for callback in self._callbacks:
                callback(event)
            self._lock.notify_all()

    def on_event(self, callback: Callable[[Any], None]) -> None:
        with self._lock:
            for event in self._events:
                callback(event)
            self._callbacks.append(callback)

    def steps(self) -> Iterator[Step]:
        at = 0
        while True:
            with self._lock:
                while len(self._events) <= at:
                    self._lock.wait()
                event = self._events[at]
            at += 1
            if event is None:
                return
            if isinstance(event, BaseException):
                raise event
            yield event

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def result(self) -> Generation:
        return self._stream.result


class Scheduler:
    def __init__(self, llm: Any, at_once: Any = "auto", queue: int | None = None) -> None:
        self._llm, self._most = llm, queue
        self._waiting: queues.Queue[Any] = queues.Queue()
        self._running = self._tokens = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Any) -> Ticket:
        if self._most is not None and self._waiting.qsize() >= self._most + 1 - self._running:
            raise QueueFull(f"{self._most} answers wait already; valid: fewer at once")
        ticket = Ticket(self._llm.start(request))
        self._waiting.put(ticket)
        return ticket

    def figures(self) -> Figures:
        return Figures(self._running, self._waiting.qsize(), self._tokens, self._running)

    def close(self) -> None:
        self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ticket := self._waiting.get()) is not None:
            self._running = 1
            try:
                with ticket._stream as steps:
                    if not ticket.cancelled and not self._closed:
                        for step in steps:
                            self._tokens += len(step.token_ids)
                            ticket._tell(step)
                            if ticket.cancelled or self._closed:
                                break
                ticket._tell(None)
            except Exception as error:
                ticket._tell(error)
            self._running = 0
