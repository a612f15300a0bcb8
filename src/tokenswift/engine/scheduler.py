"""Many texts of one model: they join and leave between steps, and share each verify pass.

One thread does all the work: a step of every text under way (`step.step`), and in the same pass a part of
a prompt that waits to be read. A part makes a step about two and a half times as long, so that nobody waits
long while another's long prompt is read. Each text is what it would be alone; strategies, samplers, journals
and failures are its own. How many run concurrently follows from the memory that their caches need; the
others wait in order.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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
from tokenswift.kernels.base import Backend
from tokenswift.types import Generation, InputError, RunError, Step, Stopped
from tokenswift.words import counted

MOST = 16  # concurrent texts with "auto": about from there rows cost what they would cost alone
BARE = 16  # every so many steps nothing is read: what a step takes without is known by those
DRAFT = 0.1  # seconds that all texts may draft for in a step, or as long as their pass, where others wait
READ = 1.5  # steps' time that a part of a prompt may add to a step
FIRST = 4  # rows of the first part that is read beside texts under way; later ones follow from their times
FEW = 64  # rows of the first part that is read alone
FEWER, MORE = 0.7, 1.1  # what the next part's rows are at least and at most, times the last one's
PART = 0.5  # seconds that a part of a prompt may take for which no text waits
_SLOW = 1 / 8  # weight of a new time in a running mean

#: a step; None: the text has ended; an exception: it has failed
Event: TypeAlias = "Step | Exception | None"


logger = logging.getLogger("tokenswift")


class Ticket:
    """A text that was asked for; may be used from any thread. Made by `Scheduler.submit`.

    Each step is given once: to `steps`, or to the callback.

    Args:
        sequence: the text.
        cancel: called with the ticket when it is to be cancelled.
    """

    def __init__(self, sequence: Sequence, cancel: Callable[[Ticket], None]) -> None:
        self._ask = cancel
        self._sequence: Sequence | None = sequence
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
    def sequence(self) -> Sequence:
        """The text; the scheduler's own.

        Raises:
            InputError: it is over.
        """
        if self._sequence is None:
            raise InputError("the ticket's text has ended; valid: ticket.result")
        return self._sequence

    def tell(self, event: Event, result: Generation | None = None) -> None:
        """An event. With the last one the text is over: whoever sees that it is finds that event."""
        with self._changed:
            if not isinstance(event, Step):
                self._sequence, self._result, self._error = None, result, event
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


class PrefillPace:
    """Size of prefill chunks, by what chunks and steps took: decode latency against time to first token.

    Args:
        most: rows of a part at most.

    Attributes:
        step: running mean of the seconds of a step in which nothing is read; 0: there was none.
    """

    def __init__(self, most: int) -> None:
        self._most, self._beside, self._alone = most, float(FIRST), FEW
        self.step = 0.0

    @property
    def beside(self) -> int:
        """Rows that fit beside a step."""
        return int(self._beside)

    @property
    def alone(self) -> int:
        """Rows of a part for which no text waits."""
        return min(self._alone, self._most)

    def has_read(self, seconds: float) -> None:
        """A part for which no text waited took so long: whoever comes, or cancels, does not wait long."""
        fit = PART / max(seconds, 1e-9)
        self._alone = min(max(FIRST, int(self.alone * min(fit, 2.0))), self._most)

    def has_stepped(self, seconds: float) -> None:
        """A step in which nothing was read took so long."""
        self.step = self.step + _SLOW * (seconds - self.step) if self.step else seconds

    def has_read_beside(self, seconds: float) -> None:
        """A step took so long with a part beside it."""
        if self.step:
            wanted = READ * self.step / max(seconds - self.step, 1e-9)
            rows = self._beside * min(max(wanted, FEWER), MORE)
            self._beside = min(max(1.0, rows), float(self._most))


class Admission:
    """The texts of one scheduler that have their turn, and the memory that they share; its thread's own.

    Args:
        backend: whose memory it is.
        prefixes: texts kept for their beginnings, which give way.
    """

    def __init__(self, backend: Backend, prefixes: Prefixes) -> None:
        self._backend, self._prefixes = backend, prefixes
        self._nbytes: dict[Ticket, int] = {}
        self._turns: dict[str, int] = {}  # of each owner, its last one's number
        self._budget = 0  # bytes that they may take together

    def __len__(self) -> int:
        return len(self._nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the texts that have their turn."""
        return sum([*self._nbytes.values()])

    def next(self, waiting: Iterable[Ticket]) -> Ticket:
        """Fair queueing: the owner with the fewest texts under way first, then the one served least
        recently."""
        held = Counter(ticket.sequence.owner for ticket in self._nbytes)
        return min(
            waiting, key=lambda one: (held[one.sequence.owner], self._turns.get(one.sequence.owner, 0))
        )

    def fits(self, sequence: Sequence) -> bool:
        """Whether the memory holds one more text.

        Raises:
            InputError: it does not hold it alone.
        """
        memory = self._backend.memory()
        if memory is None:
            return True
        if not self._nbytes:
            sequence.check_memory()
            after = self._backend.memory() or memory  # which may have let go of ended texts
            self._budget = after.free + self._prefixes.nbytes
        else:
            room = self._budget - self.nbytes - sequence.nbytes
            if room < 0:
                return False
            self._prefixes.shrink(room)
        return True

    def add(self, ticket: Ticket) -> None:
        """A text has its turn."""
        self._turns[ticket.sequence.owner] = max(self._turns.values(), default=0) + 1
        self._nbytes[ticket] = ticket.sequence.nbytes

    def remove(self, ticket: Ticket) -> None:
        """A text is over, whether it had its turn or not."""
        self._nbytes.pop(ticket, None)


class QueueFull(InputError):
    """As many requests wait as may wait."""


@dataclass(slots=True)
class Figures:
    """What a scheduler does and has done.

    Attributes:
        running, reading, waiting: texts that are written, whose prompts are read, and that wait their turn.
        at_once: texts that may run concurrently.
        ended, failed, cancelled: texts so far.
        steps: that texts have made; several in one pass count for each.
        passes: verify passes.
        tokens, drafted, accepted: new tokens, drafted nodes that were verified, and drafted tokens accepted.
        read, reused: tokens of prompts that were read, and that were copied from another text's beginning.
        rows: of the last verify pass.
        step_seconds: time of the last step of all texts, drafting and journals included.
        pause_seconds: the longest time between two steps of a text.
        kept_bytes: caches of ended texts that are kept for their beginnings.
    """

    at_once: int
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
    step_seconds: float = 0.0
    pause_seconds: float = 0.0
    kept_bytes: int = 0


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
        self._admission = Admission(llm.target.backend, self._prefixes)
        self._wake = Condition()  # guards the three lists, and what is counted
        self._waiting: deque[Ticket] = deque()
        self._reading: list[Ticket] = []
        self._running: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._is_closed = False
        self._figures = Figures(self.at_once)
        self._turn = 0
        self._pace = PrefillPace(llm.target.prefill_chunk)
        self._pass = 0.0  # seconds of the last verify pass
        self._last = 0.0  # when the last step of all texts ended; 0: none is under way
        self._sign = monotonic()  # when there was the last step, part of a prompt or end of a text
        self._thread = Thread(target=self._work, name="tokenswift-scheduler", daemon=True)
        self._thread.start()

    # ---- for any thread -------------------------------------------------------------------------

    def submit(self, request: Request, owner: str = "") -> Ticket:
        """Have a request run, in its turn. A journal begins now.

        Args:
            owner: whose it is: what texts of one owner begin with is read once.
        Raises:
            InputError: the request is wrong, or cannot fit the memory.
            QueueFull: as many wait as may.
            RunError: its journal cannot be written.
        """
        with self._wake:
            self._check_queue()
            held = self._admission.nbytes
        sequence = Sequence(self._llm, request, self._prefixes, held, owner)
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
        idle = self.at_once - len(self._running) - len(self._reading)
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
                kept_bytes=self._prefixes.nbytes,
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
                part = self._next() if self._reading else None
                if self._running:
                    self._step(part)
                elif part is not None:
                    self._read(part)
        except BaseException as error:  # a fault of this class: nobody is to wait for ever
            with self._wake:
                self._is_closed = True  # from here on nothing is submitted
                known = self._all()
            for ticket in known:
                self._leave(ticket, "failed", error)
        self._prefixes.clear()

    def _all(self) -> list[Ticket]:
        return [*self._running, *self._reading, *self._waiting]

    def _waits(self) -> bool:
        """Wait for something to do, and let those go that were cancelled; False once it is closed."""
        with self._wake:
            while not (self._is_closed or self._cancelled or self._all()):
                self._last = 0.0
                self._wake.wait()
            known = self._all()
            gone = known if self._is_closed else [one for one in self._cancelled if one in known]
            self._cancelled = []
        for ticket in gone:
            self._leave(ticket, "cancelled")
        return not self._is_closed

    def _admit(self) -> None:
        """Let texts have their turn while there is room."""
        while self._waiting and len(self._admission) < self.at_once:
            with self._wake:
                ticket = self._admission.next(self._waiting)
            try:
                if not self._admission.fits(ticket.sequence):
                    return
                self._admission.add(ticket)
            except BaseException as error:
                self._leave(ticket, "failed", error)
                continue
            with self._wake:
                self._waiting.remove(ticket)
                self._reading.append(ticket)

    def _next(self) -> Ticket | None:
        """Whose prompt is read on: in turns the text that came first and the one with the least left, so that
        neither a long one nor short ones keep the others waiting. None: it is no time to read."""
        self._turn += 1
        if self._running and self._turn % BARE == 0:
            return None
        ticket = (
            min(self._reading, key=lambda one: one.sequence.unread)
            if self._turn % 2 == 0
            else self._reading[0]
        )
        try:
            ticket.sequence.begin()
            if self._running and not ticket.sequence.cache.prefault(self._pace.step):
                return None
        except BaseException as error:
            self._leave(ticket, "failed", error)
            return None
        return ticket

    def _read(self, ticket: Ticket, rows: int | None = None) -> None:
        """Read a part of a prompt in passes of its own."""
        sequence, begun = ticket.sequence, perf_counter()
        try:
            before = sequence.unread
            left = sequence.read(rows or self._pace.alone)
        except BaseException as error:
            self._fail(ticket, error)
            return
        if rows is None and left:
            self._pace.has_read(perf_counter() - begun)
        self._has_read(ticket, before - left, left)

    def _has_read(self, ticket: Ticket, rows: int, left: int) -> None:
        self._count(read=rows)
        if (
            not left and ticket.sequence.finish_reason is not None
        ):  # no token may come: what was asked for is of the prompt
            self._finish(ticket)
        elif not left:
            with self._wake:
                self._reading.remove(ticket)
                self._running.append(ticket)

    def _step(self, reader: Ticket | None) -> None:
        """A step of every text under way, and a part of the reader's prompt."""
        begun = perf_counter()
        tickets = list(self._running)
        sequences = [ticket.sequence for ticket in tickets]
        chunk = None
        if reader is not None:
            if self._llm.target.prefill_keeps_bits and reader.sequence.unread:
                chunk = reader.sequence.chunk(self._pace.beside)
            else:  # nothing, or in the passes that it would have alone
                self._read(reader, 1)
        for ticket, made in zip(tickets, step(sequences, chunk), strict=True):
            self._take(ticket, made)
        figures = self._figures
        figures.rows = sum(sequence.rows for sequence in sequences)
        self._count(passes=1)
        if chunk is not None and reader is not None:
            figures.rows += chunk.rows
            try:
                self._has_read(reader, chunk.rows, reader.sequence.took(chunk))
            except BaseException as error:
                self._fail(reader, error)
        now = perf_counter()
        figures.step_seconds = now - begun
        if reader is None:
            self._pace.has_stepped(now - begun)
        elif chunk is not None:
            self._pace.has_read_beside(now - begun)
        if self._last:
            figures.pause_seconds = max(figures.pause_seconds, now - self._last)
        self._last = now if self._running else 0.0

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
            try:
                if error is not None:
                    error = sequence.explained(error)
                else:
                    result = sequence.result()
            finally:
                sequence.close()
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
            self._admission.remove(ticket)
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
        ticket.on_event(partial(_collect, ticket, number, ended, on_step))
    for _ in range(under_way):
        yield ended.get()


def _collect(
    ticket: Ticket,
    number: int,
    ended: SimpleQueue[tuple[int, Generation | Exception]],
    on_step: Callable[[int, Step], object] | None,
    event: Event,
) -> None:
    if not isinstance(event, Step):
        ended.put((number, ticket.result if event is None else event))
    elif on_step is not None:
        on_step(number, event)
