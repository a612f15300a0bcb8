"""Many texts of one model: they join and leave between steps, and share each verify pass.

One thread does all the work: a step of every text under way (`step.step`), and after it a part of a prompt
that waits to be read, which takes about one and a half steps' time, so that nobody waits long while another's
long prompt is read. Each text is what it would be alone; strategies, samplers, journals
and failures are its own. How many run concurrently follows from the memory that their caches need; the
others wait in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from queue import SimpleQueue
from threading import Condition, Thread, current_thread
from time import monotonic, perf_counter
from typing import Any, Literal, TypeAlias

from tokenswift.checks import check_integer
from tokenswift.config import shown
from tokenswift.engine.prefix_cache import Prefixes
from tokenswift.engine.request import Request, check_callback
from tokenswift.engine.sequence import Sequence
from tokenswift.engine.step import step
from tokenswift.interfaces import FeatureStore
from tokenswift.types import Generation, InputError, RunError, Step, Stopped
from tokenswift.words import counted

MOST = 16  # concurrent texts with "auto": about from there rows cost what they would cost alone
DRAFT = 0.1  # seconds that all texts may draft for in a step, or as long as their pass, where others wait
READ = 1.5  # steps' time that a part of a prompt takes where texts wait for it
PART = 0.5  # seconds that it takes where none does: whoever comes, or cancels, does not wait long
FEWEST = 4  # rows of a part
_SLOW = 1 / 8  # weight of a new time in a running mean

#: a step; None: the text has ended; an exception: it has failed
Event: TypeAlias = "Step | Exception | None"


logger = logging.getLogger("tokenswift")


class Ticket:
    """A text that was asked for; may be used from any thread. Made by `Scheduler.submit`.

    Each step is given once: to `steps`, to ``async for step in ticket``, or to the callback.

    Args:
        sequence: the text.
        cancel: called with the ticket when it is to be cancelled.
    """

    def __init__(self, sequence: Sequence, cancel: Callable[[Ticket], None]) -> None:
        self._ask = cancel
        self.sequence = sequence  # until it is over
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

    async def __aiter__(self) -> AsyncIterator[Step]:
        """The steps as they come, in an asynchronous program; leaving them ends the text.

        Raises:
            Exception: the text's failure, after its last step.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def tell(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        self.on_event(tell)
        if self.is_over:  # its last event may have been given before
            events.put_nowait(None)
        try:
            while isinstance(event := await events.get(), Step):
                yield event
        finally:
            self.cancel()
        if event is not None:
            raise event

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

    def tell(self, event: Event, result: Generation | None = None) -> None:
        """An event. With the last one the text is over: whoever sees that it is finds that event."""
        with self._changed:
            if not isinstance(event, Step):
                self._result, self._error = result, event
                del self.sequence
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


class QueueFull(InputError):
    """As many requests wait as may wait."""


@dataclass(slots=True)
class Figures:
    """What a scheduler does and has done.

    Attributes:
        running, reading, waiting: texts that are written, whose prompts are read, and that wait their turn.
        ended, failed, cancelled: texts so far.
        steps: that texts have made; several in one pass count for each.
        passes: verify passes.
        tokens, drafted, accepted: new tokens, drafted nodes that were verified, and drafted tokens accepted.
        read, reused: tokens of prompts that were read, and that were copied from another text's beginning.
        rows: of the last verify pass.
    """

    running: int = 0
    reading: int = 0
    waiting: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    read: int = 0
    reused: int = 0
    rows: int = 0


class Scheduler:
    """Runs many requests of one ``LLM``, several in each pass, on one thread of its own.

    A scheduler is a context manager; `close` ends what is under way.

    Args:
        llm: the ``LLM``.
        at_once: concurrent texts at most; "auto": as many as the memory holds, and pay.
        queue: requests that may wait; None: any number.
    Raises:
        InputError: naming the argument and what is valid.
    """

    def __init__(self, llm: Any, at_once: int | Literal["auto"] = "auto", queue: int | None = None) -> None:
        self.at_once = check_at_once(at_once)
        self._queue = queue if queue is None else check_integer("queue", queue, 0)
        self._llm = llm
        self._prefixes = Prefixes.beside(llm.target)
        self._budget = 0  # bytes that the texts that have their turn may take together
        self._turns: dict[str, int] = {}  # of each owner, its last one's number
        self._wake = Condition()  # guards the three lists, and what is counted
        self._waiting: deque[Ticket] = deque()
        self._reading: list[Ticket] = []
        self._running: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._is_closed = False
        self._figures = Figures()
        self._turn = 0
        self._seconds = self._speed = 0.0  # running means: of a step, and of rows that are read in a second
        self._pass = 0.0  # seconds of the last verify pass
        self._sign = monotonic()  # when there was the last step, part of a prompt or end of a text
        self._thread = Thread(target=self._work, name="tokenswift-scheduler", daemon=True)
        self._thread.start()

    # ---- for any thread -------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        owner: str = "",
        features: FeatureStore | None = None,
        prefixes: Prefixes | None = None,
    ) -> Ticket:
        """Have a request run, in its turn. A journal begins now.

        Args:
            owner: whose it is: what texts of one owner begin with is read once.
            features: takes those of its tokens (see `models.base.BaseTarget.tap`), from the first one on that
                no other text began with.
            prefixes: texts whose beginnings need not be read; None: the scheduler's own.
        Raises:
            InputError: the request is wrong, or cannot fit the memory.
            QueueFull: as many wait as may.
            RunError: its journal cannot be written.
        """
        with self._wake:
            self._check_queue()
            held = self._held()
        sequence = Sequence(self._llm, request, prefixes or self._prefixes, held, owner)
        sequence.features = features  # type: ignore[assignment]
        try:
            sequence.open()
            ticket = Ticket(sequence, self._cancel)
            sequence.wanted = partial(self._wants, ticket)
            if sequence.strategy.acceptance == "exact":  # others' drafts change tokens
                sequence.patience = self._patience
            if sequence.finish_reason is not None:  # by its journal it has ended already
                self._finish(ticket)
                return ticket
            with self._wake:
                self._check_queue()
                if not self._all():
                    self._sign = monotonic()
                self._waiting.append(ticket)
                self._wake.notify()
        except BaseException:
            sequence.close()
            raise
        return ticket

    def _check_queue(self) -> None:
        if self._is_closed:
            raise InputError("the scheduler is closed; valid: one that was not closed")
        idle = self.at_once - len(self._admitted())
        if self._queue is not None and len(self._waiting) >= self._queue + max(0, idle):
            waiting = counted(len(self._waiting), "request waits", "requests wait")
            raise QueueFull(f"{waiting} already; valid: up to queue {self._queue}")

    def figures(self) -> Figures:
        """What is under way, and what was done so far."""
        with self._wake:
            return replace(
                self._figures,
                running=len(self._running),
                reading=len(self._reading),
                waiting=len(self._waiting),
                reused=self._prefixes.reused,
            )

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing more: `close` was called, or a fault of its own ended it."""
        return self._is_closed

    @property
    def stalled(self) -> float:
        """Seconds since the last step, or part of a prompt, while there is something to do; 0 otherwise."""
        with self._wake:
            return monotonic() - self._sign if self._all() else 0.0

    def close(self) -> None:
        """End all texts after the step under way, as by `Ticket.cancel`, and the thread with them. A callback
        that calls it does not wait for that."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cancel(self, ticket: Ticket) -> None:
        with self._wake:
            self._cancelled.append(ticket)
            self._wake.notify()

    def _wants(self, ticket: Ticket) -> bool:
        """Whether a text is to go on."""
        return not self._is_closed and ticket not in self._cancelled

    def _patience(self) -> float:
        """Seconds that a text may draft for: one that drafts for long does not keep the others waiting."""
        if len(self._running) + len(self._reading) + len(self._waiting) < 2:
            return inf
        return max(DRAFT, self._pass) / max(1, len(self._running))

    # ---- its own thread -------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._waits():
                self._admit()
                if self._running:
                    self._step()
                if self._reading:
                    self._read()
        except BaseException as error:  # a fault of this class: nobody is to wait for ever
            with self._wake:
                self._is_closed = True  # from here on nothing is submitted
                known = self._all()
            for ticket in known:
                self._leave(ticket, "failed", error)
        self._prefixes.clear()

    def _admitted(self) -> list[Ticket]:
        return [*self._running, *self._reading]

    def _all(self) -> list[Ticket]:
        return [*self._admitted(), *self._waiting]

    def _held(self) -> int:
        """Bytes of the texts that have their turn."""
        return sum(one.sequence.nbytes for one in self._admitted())

    def _waits(self) -> bool:
        """Wait for something to do, and let those go that were cancelled; False once it is closed."""
        with self._wake:
            while not (self._is_closed or self._cancelled or self._all()):
                self._wake.wait()
            known = self._all()
            gone = known if self._is_closed else [one for one in self._cancelled if one in known]
            self._cancelled = []
        for ticket in gone:
            self._leave(ticket, "cancelled")
        return not self._is_closed

    def _admit(self) -> None:
        """Let texts have their turn while there is room. Fair queueing: the owner with the fewest texts under
        way first, then the one served least recently."""
        while self._waiting and len(self._admitted()) < self.at_once:
            held = Counter(one.sequence.owner for one in self._admitted())
            with self._wake:
                ticket = min(
                    self._waiting,
                    key=lambda one: (held[one.sequence.owner], self._turns.get(one.sequence.owner, 0)),
                )
            try:
                if not self._fits(ticket.sequence):
                    return
            except BaseException as error:
                self._leave(ticket, "failed", error)
                continue
            self._turns[ticket.sequence.owner] = max(self._turns.values(), default=0) + 1
            with self._wake:
                self._waiting.remove(ticket)
                self._reading.append(ticket)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the memory holds one more text, for which texts kept for their beginnings give way.

        Raises:
            InputError: it does not hold it alone.
        """
        backend = self._llm.target.backend
        memory = backend.memory()
        if memory is None:
            return True
        if not self._admitted():
            sequence.check_memory()
            after = backend.memory() or memory  # which may have let go of ended texts
            self._budget = after.free + self._prefixes.nbytes
            return True
        room = self._budget - self._held() - sequence.nbytes
        if room >= 0:
            self._prefixes.shrink(room)
        return room >= 0

    def _read(self) -> None:
        """Read a part of a prompt: in turns of the text that came first and of the one with the least left,
        so that neither a long one nor short ones keep the others waiting."""
        self._turn += 1
        least = min(self._reading, key=lambda one: one.sequence.unread)
        ticket = self._reading[0] if self._turn % 2 else least
        most: int = self._llm.target.prefill_chunk
        rows = int(self._speed * (READ * self._seconds if self._running else PART))
        try:
            ticket.sequence.begin()
            before, begun = ticket.sequence.unread, perf_counter()
            left = ticket.sequence.read(max(FEWEST, min(rows, most)))
        except BaseException as error:
            self._fail(ticket, error)
            return
        if left:
            speed = (before - left) / max(perf_counter() - begun, 1e-9)
            self._speed = (self._speed + speed) / 2 if self._speed else speed
        self._count(read=before - left)
        if not left:
            with self._wake:
                self._reading.remove(ticket)
                self._running.append(ticket)

    def _step(self) -> None:
        """A step of every text under way."""
        begun, tickets = perf_counter(), list(self._running)
        sequences = [ticket.sequence for ticket in tickets]
        for ticket, made in zip(tickets, step(sequences), strict=True):
            self._take(ticket, made)
        self._figures.rows = sum(sequence.rows for sequence in sequences)
        self._count(passes=1)
        self._seconds += _SLOW * (perf_counter() - begun - self._seconds)

    def _take(self, ticket: Ticket, made: Step | Exception) -> None:
        """A text's part of a step; it may be the last one."""
        sequence = ticket.sequence
        try:
            if isinstance(made, Exception):
                raise made
            made = sequence.take(made)
            self._pass = made.times.get("verify", 0.0)
            self._count(steps=1, tokens=len(made.token_ids), drafted=made.drafted, accepted=made.accepted)
            ticket.tell(made)
        except BaseException as error:
            self._fail(ticket, error)
            return
        if sequence.finish_reason is not None:
            self._finish(ticket)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """A text cannot go on; one that is not wanted leaves with the others of its kind (`_waits`)."""
        if not isinstance(error, Stopped):
            self._leave(ticket, "failed", error)

    def _finish(self, ticket: Ticket) -> None:
        try:
            ticket.sequence.finish()
        except BaseException as error:
            self._leave(ticket, "failed", error)
        else:
            self._leave(ticket, "ended")

    def _leave(self, ticket: Ticket, how: str, error: BaseException | None = None) -> None:
        """A text is over: let go of its memory and journal, and tell who waits for it. Never raises."""
        sequence, result = ticket.sequence, None
        try:
            with closing(sequence):
                result = None if error is not None else sequence.result()
                error = None if error is None else sequence.explained(error)
        except BaseException as fault:
            how, result, error = "failed", None, error or fault
        if result is not None and how == "cancelled":
            result = replace(result, finish_reason=how)
        if error is not None and not isinstance(error, Exception):  # a callback's sys.exit, say
            error, cause = RunError(f"generation failed ({error!r})"), error
            error.__cause__ = cause
        with self._wake:
            for those in (self._running, self._reading, self._waiting):
                with suppress(ValueError):
                    those.remove(ticket)
        self._count(**{how: 1})
        ticket.end(result, error)

    def _count(self, **more: int) -> None:
        with self._wake:
            self._sign = monotonic()
            for name, number in more.items():
                setattr(self._figures, name, getattr(self._figures, name) + number)


def check_at_once(at_once: object) -> int:
    """How many texts run concurrently at most.

    Raises:
        InputError: neither "auto" nor an integer from 1 on.
    """
    if at_once == "auto":
        return MOST
    if isinstance(at_once, str):
        raise InputError(f"at_once is {shown(at_once)}; valid: auto, or an integer from 1 on", "at_once")
    return check_integer("at_once", at_once, 1)


def run_all(
    scheduler: Scheduler, requests: Iterable[Request], on_step: Callable[[int, Step], object] | None = None
) -> Iterator[tuple[int, Generation | Exception]]:
    """Run requests, a few of them submitted ahead; yields each one's number and its result, or what made it
    fail, in the order in which they end. ``on_step`` is called with number and step, from the scheduler's
    thread."""
    ended: SimpleQueue[tuple[int, Generation | Exception]] = SimpleQueue()
    under_way = 0

    def collect(ticket: Ticket, number: int, event: Event) -> None:
        if not isinstance(event, Step):
            ended.put((number, ticket.result if event is None else event))
        elif on_step is not None:
            on_step(number, event)

    for number, request in enumerate(requests):
        if under_way >= 2 * scheduler.at_once:
            yield ended.get()
            under_way -= 1
        try:
            ticket = scheduler.submit(request)
        except Exception as error:
            yield number, error
            continue
        under_way += 1
        ticket.on_event(partial(collect, ticket, number))
    for _ in range(under_way):
        yield ended.get()
