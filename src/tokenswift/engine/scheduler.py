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
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread, current_thread
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from tokenswift.engine.request import Request
from tokenswift.engine.sequence import Prefixes, Sequence, failure
from tokenswift.engine.step import step
from tokenswift.kv import FeatureStore
from tokenswift.types import Cancelled, Generation, InputError, Step, check_callback, check_integer, counted

MOST = 16  # concurrent texts with "auto": about from there rows cost what they would cost alone
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

    Attributes:
        sequence: the text, until it is over.
        state: "waiting", "reading" (its prompt is) or "running".
        is_cancelled: whether it is to end.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.state, self.is_cancelled = "waiting", False
        self._events: deque[Event] = deque()
        self._giving = Lock()
        self._callback: Callable[[Event], object] | None = None
        self._over = Future[Generation | None]()

    def steps(self) -> Iterator[Step]:
        """The steps as they come; waits for the next.

        Raises:
            Exception: the text's failure, after its last step.
        """
        events = SimpleQueue[Event]()
        self._follow(events.put)
        while isinstance(event := events.get(), Step):
            yield event
        if event is not None:
            raise event

    async def __aiter__(self) -> AsyncIterator[Step]:
        """The steps as they come, in an asynchronous program; leaving them ends the text.

        Raises:
            Exception: the text's failure, after its last step.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def tell(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
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
        """`on_event`, and the end where the last event was given before, or is being given."""
        self.on_event(callback)
        if self.is_over:
            callback(self._over.exception())  # type: ignore[arg-type]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the text is over, ``timeout`` seconds at most; whether it is."""
        return not wait([self._over], timeout).not_done

    @property
    def is_over(self) -> bool:
        """Whether it has ended, failed or was cancelled."""
        return self._over.done()

    @property
    def result(self) -> Generation:
        """The generation, once it is over; of a cancelled one what there is, its ``finish_reason``
        "cancelled".

        Raises:
            InputError: it is not over.
            Exception: its failure.
        """
        if not self.is_over or (made := self._over.result()) is None:
            raise InputError("ticket.result is not available before the end; valid: after ticket.wait()")
        return made

    def cancel(self) -> None:
        """End the text after the step under way, or the draft pass; a journal stays and can be gone on
        with."""
        self.is_cancelled = True

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have ``callback(step)`` called for each step, ``callback(exception)`` when the text fails, and
        ``callback(None)`` when it ends, from the scheduler's thread; for what happened before this call,
        from the caller's. A callback that raises ends the text."""
        check_callback("callback", callback)
        while True:
            with self._giving:
                if not self._events:
                    self._callback = callback
                    return
                event = self._events.popleft()
            callback(event)

    def tell(self, event: Event, result: Generation | None = None) -> None:
        """An event. With the last one the text is over: whoever sees that it is finds that event."""
        with self._giving:
            callback = self._callback
            if callback is None:
                self._events.append(event)
            if not isinstance(event, Step):
                del self.sequence  # its memory can be had
                if event is None:
                    self._over.set_result(result)
                else:
                    self._over.set_exception(event)
        if callback is not None:
            callback(event)


class QueueFull(InputError):
    """As many requests wait as may wait."""


#: what a scheduler counts, see `Scheduler.figures`
FIGURES = ("running", "reading", "waiting", "ended", "failed", "cancelled", "steps", "passes", "tokens")
FIGURES += ("drafted", "accepted", "read", "reused", "rows")


class Scheduler(AbstractContextManager["Scheduler"]):
    """Runs many requests of one ``LLM``, several in each pass, on one thread of its own.

    A scheduler is a context manager; `close` ends what is under way.

    Args:
        llm: the ``LLM``.
        at_once: concurrent texts at most; "auto": as many as the memory holds, and pay.
        queue: requests that may wait; None: any number.

    Attributes:
        is_closed: whether it takes nothing more: `close` was called, or a fault of its own ended it.
    Raises:
        InputError: naming the argument and what is valid.
    """

    def __init__(self, llm: Any, at_once: int | Literal["auto"] = "auto", queue: int | None = None) -> None:
        valid = "auto, or an integer of at least 1"
        self.at_once = MOST if at_once == "auto" else check_integer("at_once", at_once, 1, valid)
        self._queue = queue if queue is None else check_integer("queue", queue, 0)
        self._llm = llm
        self._prefixes = Prefixes.beside(llm.target)
        self._budget = 0  # bytes that the texts that have their turn may take together
        self._turns: dict[str, int] = {}  # of each owner, its last one's number
        self._wake = Condition()  # guards the tickets, and what is counted
        self._tickets: list[Ticket] = []
        self.is_closed = False
        self._figures: dict[str, int] = dict.fromkeys(FIGURES, 0)
        self._turn = 0
        self._seconds = self._speed = 0.0  # running means: of a step, and of rows that are read in a second
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
            features: takes those of its tokens (see `BaseTarget.tap`), from the first one on that no other
                text began with.
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
            ticket = Ticket(sequence)
            sequence.is_wanted = partial(self._wants, ticket)
            if sequence.finish_reason is not None:  # by its journal it has ended already
                self._leave(ticket)
                return ticket
            with self._wake:
                self._check_queue()
                if not self._tickets:
                    self._sign = monotonic()
                self._tickets.append(ticket)
                self._wake.notify()
        except BaseException:
            sequence.close()
            raise
        return ticket

    def _check_queue(self) -> None:
        if self.is_closed:
            raise InputError("the scheduler is closed; valid: one that was not closed")
        waiting = len(self._of("waiting"))
        idle = self.at_once - len(self._tickets) + waiting
        if self._queue is not None and waiting >= self._queue + max(0, idle):
            said = counted(waiting, "request waits", "requests wait")
            raise QueueFull(f"{said} already; valid: up to queue {self._queue}")

    def figures(self) -> SimpleNamespace:
        """What is under way, and what was done so far, as attributes.

        ``running``, ``reading``, ``waiting``: texts that are written, whose prompts are read, and that wait
        their turn; ``ended``, ``failed``, ``cancelled``: texts so far; ``steps`` that texts have made
        (several in one pass count for each), ``passes``: verify passes; ``tokens``, ``drafted``,
        ``accepted``: new tokens, drafted nodes that were verified, and drafted tokens accepted; ``read``,
        ``reused``: tokens of prompts that were read, and that were copied from another text's beginning;
        ``rows`` of the last verify pass.
        """
        with self._wake:
            states = Counter(ticket.state for ticket in self._tickets)
            return SimpleNamespace(**self._figures | {"reused": self._prefixes.reused} | states)

    @property
    def stalled(self) -> float:
        """Seconds since the last step, or part of a prompt, while there is something to do; 0 otherwise."""
        with self._wake:
            return monotonic() - self._sign if self._tickets else 0.0

    def close(self) -> None:
        """End all texts after the step under way, as by `Ticket.cancel`, and the thread with them. A callback
        that calls it does not wait for that."""
        with self._wake:
            self.is_closed = True
            self._wake.notify()
        if current_thread() is not self._thread:
            self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wants(self, ticket: Ticket) -> bool:
        """Whether a text is to go on."""
        return not (self.is_closed or ticket.is_cancelled)

    def _of(self, *states: str) -> list[Ticket]:
        return [ticket for ticket in self._tickets if ticket.state in states]

    def _held(self) -> int:
        """Bytes of the texts that have their turn."""
        return sum(one.sequence.nbytes for one in self._of("reading", "running"))

    # ---- its own thread -------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._waits():
                self._admit()
                if self._of("running"):
                    self._step()
                if self._of("reading"):
                    self._read()
        except BaseException as error:  # a fault of this class: nobody is to wait for ever
            with self._wake:
                self.is_closed = True  # from here on nothing is submitted
            for ticket in list(self._tickets):
                self._leave(ticket, "failed", error)
        self._prefixes.clear()

    def _waits(self) -> bool:
        """Wait for something to do, and let those go that are not wanted; False once it is closed."""
        with self._wake:
            while not (self.is_closed or self._tickets):
                self._wake.wait()
            gone = [ticket for ticket in self._tickets if not self._wants(ticket)]
            closed = self.is_closed
        for ticket in gone:
            self._leave(ticket, "cancelled")
        return not closed

    def _admit(self) -> None:
        """Let texts have their turn while there is room: those of the owner with the fewest texts under way
        first, then of the one served least recently."""
        while len(under_way := self._of("reading", "running")) < self.at_once:
            held = Counter(one.sequence.owner for one in under_way)
            with self._wake:
                waiting = self._of("waiting")
            if not waiting:
                return
            owners = [one.sequence.owner for one in waiting]
            ranks = [(held[owner], self._turns.get(owner, 0)) for owner in owners]
            ticket = waiting[ranks.index(min(ranks))]
            try:
                if not self._fits(ticket.sequence):
                    return
            except BaseException as error:
                self._leave(ticket, "failed", error)
                continue
            self._turns[ticket.sequence.owner] = max(self._turns.values(), default=0) + 1
            ticket.state = "reading"

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the memory holds one more text, for which texts kept for their beginnings give way.

        Raises:
            InputError: it does not hold it alone.
        """
        backend = self._llm.target.backend
        memory = backend.memory()
        if memory is None:
            return True
        if not self._of("reading", "running"):
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
        reading, running = self._of("reading"), self._of("running")
        ticket = reading[0] if self._turn % 2 else min(reading, key=lambda one: one.sequence.unread)
        most: int = self._llm.target.prefill_chunk
        rows = int(self._speed * (READ * self._seconds if running else PART))
        try:
            ticket.sequence.begin()
            before, begun = ticket.sequence.unread, perf_counter()
            left = ticket.sequence.read(max(FEWEST, min(rows, most)))
        except BaseException as error:
            self._leave(ticket, "failed", error)
            return
        self._count(read=before - left)
        if left:
            speed = (before - left) / max(perf_counter() - begun, 1e-9)
            self._speed = (self._speed + speed) / 2 if self._speed else speed
        else:
            ticket.state = "running"

    def _step(self) -> None:
        """A step of every text under way."""
        begun, tickets = perf_counter(), self._of("running")
        sequences = [ticket.sequence for ticket in tickets]
        for ticket, made in zip(tickets, step(sequences), strict=True):
            self._take(ticket, made)
        self._figures["rows"] = sum(sequence.rows for sequence in sequences)
        self._count(passes=1)
        self._seconds += _SLOW * (perf_counter() - begun - self._seconds)

    def _take(self, ticket: Ticket, made: Step | Exception) -> None:
        """A text's part of a step; it may be the last one."""
        sequence = ticket.sequence
        try:
            if isinstance(made, Exception):
                raise made
            made = sequence.take(made)
            self._count(steps=1, tokens=len(made.token_ids), drafted=made.drafted, accepted=made.accepted)
            ticket.tell(made)
        except BaseException as error:
            self._leave(ticket, "failed", error)
            return
        if sequence.finish_reason is not None:
            self._leave(ticket)

    def _leave(self, ticket: Ticket, how: str = "ended", error: BaseException | None = None) -> None:
        """A text is over: let go of its memory and journal, and tell who waits for it. Never raises."""
        if isinstance(error, Cancelled):  # `_waits` lets go of cancelled ones
            return
        result = None
        try:
            with closing(ticket.sequence) as sequence:
                if how == "ended":
                    sequence.finish()
                if error is None:
                    result = sequence.result()
        except BaseException as fault:
            how, result, error = "failed", None, error or fault
        if result is not None and how == "cancelled":
            result = replace(result, finish_reason=how)
        with self._wake:
            self._tickets = [one for one in self._tickets if one is not ticket]
        self._count(**{how: 1})
        try:
            ticket.tell(None if error is None else failure(error), result)
        except BaseException as fault:  # nothing is left that it could end
            logger.warning("a callback failed at the end of its text (%s)", fault)

    def _count(self, **more: int) -> None:
        with self._wake:
            self._sign = monotonic()
            for name, number in more.items():
                self._figures[name] += number


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
