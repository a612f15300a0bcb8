"""Continuous batching: many sequences of one model join and leave between steps, and share each
verify pass.

One thread does all the work. It alternates between a step of all running sequences (`step.step`)
and a chunk of one waiting prompt's prefill, sized to take about one and a half steps, so that
decoding never stalls for long. A strategy that drafts what it is set to, however many share the
pass, may take as much time as all others, and waits while it has had more. Each sequence gets the
tokens that it would get alone; strategy, sampler, journal and errors are its own. The memory of
their KV caches limits how many run at once; the others wait in a queue.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from threading import Condition, Thread, current_thread
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Literal, TypeAlias

from tokenswift.checks import check_integer, counted
from tokenswift.engine.failures import QueueFull, failure
from tokenswift.engine.fairness import NEW_WEIGHT, Owners, SharedTime
from tokenswift.engine.figures import Figures
from tokenswift.engine.masks_ahead import MasksAhead
from tokenswift.engine.prefix_cache import PrefixCache
from tokenswift.engine.request import Request
from tokenswift.engine.sequence import Sequence
from tokenswift.engine.step import step
from tokenswift.engine.ticket import Ticket, TicketState
from tokenswift.speculation.eagle.features import Features
from tokenswift.speculation.resources import Resources
from tokenswift.types import Cancelled, InputError, Step

if TYPE_CHECKING:  # it imports this module
    from tokenswift.engine.llm import LLM

logger = logging.getLogger("tokenswift")

Outcome: TypeAlias = Literal["ended", "failed", "cancelled"]

MAX_AT_ONCE = 16  # sequences at once with "auto": with more, a row costs about what it costs alone
PREFILL_STEPS = 1.5  # time of a prefill chunk in steps, while sequences decode
PREFILL_SECONDS = 0.5  # seconds of a prefill chunk while none does; new requests wait for it
MASK_SECONDS = 0.02  # until new work is looked for while a mask is being made
MIN_PREFILL = 4  # tokens of a prefill chunk at least


class Scheduler(AbstractContextManager["Scheduler"]):
    """Runs many requests of one model, several in each pass, on a thread of its own.

    A scheduler is a context manager; `close` ends all sequences.

    Args:
        llm: the ``LLM``, or its resources.
        at_once: sequences that run at once, at most; "auto": as many as fit the memory, up to 16.
        queue: requests that may wait; None: any number.

    Attributes:
        is_closed: whether it accepts no more requests: `close` was called, or an internal error
            ended it.
    Raises:
        InputError: naming the argument and what is valid.
    """

    def __init__(
        self,
        llm: LLM | Resources,
        at_once: int | Literal["auto"] = "auto",
        queue: int | None = None,
    ) -> None:
        valid = "auto, or an integer of at least 1"
        self.at_once = (
            MAX_AT_ONCE if at_once == "auto" else check_integer("at_once", at_once, 1, valid)
        )
        self._queue = queue if queue is None else check_integer("queue", queue, 0)
        self._resources = llm if isinstance(llm, Resources) else llm.resources
        self._prefixes = PrefixCache.for_model(self._resources.target)
        self._budget = 0  # bytes for all admitted sequences
        self._owners = Owners()
        self._changed = Condition()  # guards the tickets and figures; notified on changes
        self._tickets: list[Ticket] = []
        self.is_closed = False
        self._totals: Counter[str] = Counter()  # by the names of `Figures`
        self._rows = 0  # of the last verify pass
        self._masks = MasksAhead()
        self._prefills = 0  # prefill chunks so far
        self._step_seconds = 0.0  # running mean
        self._prefill_speed = 0.0  # tokens per second, running mean
        self._shared_time = SharedTime()
        self._last_progress = monotonic()  # time of the last step, prefill chunk or end
        self._thread = Thread(target=self._work, name="tokenswift-scheduler", daemon=True)
        self._thread.start()

    # ---- for any thread --------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        owner: str = "",
        features: Features | None = None,
        prefixes: PrefixCache | None = None,
    ) -> Ticket:
        """Queue a request. Its journal begins now.

        Args:
            owner: its client: sequences of one owner share KV caches of common prefixes, and owners
                take turns.
            features: keeps the features of its tokens (see `BaseTarget.set_feature_layers`), but
                for a copied prefix.
            prefixes: the prefix cache to use; None: the scheduler's own.
        Raises:
            InputError: the request is invalid, or can never fit the memory.
            QueueFull: the queue is full.
            RunError: its journal cannot be written.
        """
        with self._changed:
            self._check_queue()
            held = self._bytes_in_use()
        sequence = Sequence(self._resources, request, prefixes or self._prefixes, held, owner)
        sequence.features = features
        try:
            sequence.open()
            ticket = Ticket(sequence)
            sequence.is_wanted = partial(self._is_wanted, ticket)
            if sequence.finish_reason is not None:  # the resumed run had ended
                self._end(ticket)
                return ticket
            with self._changed:
                self._check_queue()
                if not self._tickets:
                    self._last_progress = monotonic()
                self._tickets.append(ticket)
                self._changed.notify()
        except BaseException:
            sequence.close()
            raise
        return ticket

    def _check_queue(self) -> None:
        if self.is_closed:
            raise InputError("the scheduler is closed; valid: one that was not closed")
        waiting = len(self._in_state("waiting"))
        idle = self.at_once - len(self._tickets) + waiting
        if self._queue is not None and waiting >= self._queue + max(0, idle):
            queued = counted(waiting, "request waits", "requests wait")
            raise QueueFull(f"{queued} already; valid: up to queue {self._queue}")

    def figures(self) -> Figures:
        """The current state and the totals."""
        with self._changed:
            states = Counter(ticket.state for ticket in self._tickets)
            totals = self._totals
            return Figures(
                running=states["running"],
                reading=states["reading"],
                waiting=states["waiting"],
                ended=totals["ended"],
                failed=totals["failed"],
                cancelled=totals["cancelled"],
                steps=totals["steps"],
                passes=totals["passes"],
                tokens=totals["tokens"],
                drafted=totals["drafted"],
                accepted=totals["accepted"],
                read=totals["read"],
                reused=self._prefixes.reused,
                rows=self._rows,
            )

    @property
    def stalled(self) -> float:
        """Seconds since the last step or prefill chunk while there is work; 0 otherwise."""
        with self._changed:
            return monotonic() - self._last_progress if self._tickets else 0.0

    def close(self) -> None:
        """Cancel all sequences after the current step, and end the thread; waits for that, except
        in a callback."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()
        if current_thread() is not self._thread:
            self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_wanted(self, ticket: Ticket) -> bool:
        """Whether its sequence should go on."""
        return not (self.is_closed or ticket.is_cancelled)

    def _in_state(self, *states: TicketState) -> list[Ticket]:
        return [ticket for ticket in self._tickets if ticket.state in states]

    def _bytes_in_use(self) -> int:
        """Bytes of the admitted sequences."""
        admitted = self._in_state("reading", "running")
        return sum(ticket.sequence.nbytes for ticket in admitted)

    # ---- its own thread --------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                self._admit()
                if self._in_state("running"):
                    self._step()
                if self._in_state("reading"):
                    self._prefill()
        # an error of the scheduler itself: no caller may wait for ever
        except BaseException as error:
            with self._changed:
                self.is_closed = True  # before the others are ended, so that none is added
            for ticket in list(self._tickets):
                self._end(ticket, "failed", error)
        self._masks.close()
        self._prefixes.clear()

    def _wait_for_work(self) -> bool:
        """Wait for work, and end cancelled sequences; returns False once the scheduler is
        closed."""
        with self._changed:
            while not (self.is_closed or self._tickets):
                self._changed.wait()
            cancelled = [ticket for ticket in self._tickets if not self._is_wanted(ticket)]
            is_closed = self.is_closed
        for ticket in cancelled:
            self._end(ticket, "cancelled")
        return not is_closed

    def _admit(self) -> None:
        """Admit waiting sequences while there is room, their owners in turn."""
        while True:
            admitted = self._in_state("reading", "running")
            if len(admitted) >= self.at_once:
                return
            with self._changed:
                waiting = self._in_state("waiting")
            if not waiting:
                return
            ticket = self._owners.next_of(waiting, admitted)
            try:
                if not self._fits(ticket.sequence):
                    return
            except BaseException as error:
                self._fail(ticket, error)
                continue
            self._owners.record_admission(ticket)
            ticket.state = "reading"

    def _fits(self, sequence: Sequence) -> bool:
        """Whether one more sequence fits the memory; cached prefixes are dropped for it.

        Raises:
            InputError: it does not fit even alone.
        """
        backend = self._resources.target.backend
        memory = backend.memory()
        if memory is None:
            return True
        if not self._in_state("reading", "running"):
            sequence.check_memory()
            after = backend.memory() or memory  # cached prefixes may have been dropped
            self._budget = after.free + self._prefixes.nbytes
            return True
        room = self._budget - self._bytes_in_use() - sequence.nbytes
        if room >= 0:
            self._prefixes.shrink(room)
        return room >= 0

    def _prefill(self) -> None:
        """Prefill a chunk of one prompt: alternately of the sequence admitted first, and of the one
        with the fewest tokens left, so that neither long nor short prompts keep the others
        waiting."""
        self._prefills += 1
        prefilling = self._in_state("reading")
        ticket = prefilling[0]
        if self._prefills % 2 == 0:
            ticket = min(prefilling, key=lambda ticket: ticket.sequence.prefill_left)
        is_decoding = bool(self._in_state("running"))
        seconds = PREFILL_STEPS * self._step_seconds if is_decoding else PREFILL_SECONDS
        rows = min(int(self._prefill_speed * seconds), self._resources.target.prefill_chunk)
        try:
            ticket.sequence.make_cache()
            before = ticket.sequence.prefill_left
            begun = perf_counter()
            left = ticket.sequence.prefill(max(MIN_PREFILL, rows))
        except BaseException as error:
            self._fail(ticket, error)
            return
        self._count(read=before - left)
        if not left:
            ticket.state = "running"
            return
        speed = (before - left) / max(perf_counter() - begun, 1e-9)
        if self._prefill_speed:
            speed = (self._prefill_speed + speed) / 2
        self._prefill_speed = speed

    def _step(self) -> None:
        """One step of the running sequences whose turn it is, but for those whose masks are being
        made."""
        turn = self._shared_time.turn(self._in_state("running"))
        tickets = [ticket for ticket in turn if self._masks.is_ready(ticket)]
        if not tickets:
            idle = not self._in_state("reading")
            self._masks.wait(MASK_SECONDS * idle)
            return
        self._shared_time.begin_step(tickets)
        begun = perf_counter()
        sequences = [ticket.sequence for ticket in tickets]
        for ticket, result in zip(tickets, step(sequences), strict=True):
            self._add_step(ticket, result)
        self._rows = sum(sequence.rows for sequence in sequences)
        self._count(passes=1)
        seconds = perf_counter() - begun
        self._step_seconds += NEW_WEIGHT * (seconds - self._step_seconds)
        self._shared_time.end_step(seconds)

    def _add_step(self, ticket: Ticket, result: Step | Exception) -> None:
        """Record one sequence's part of a step, and deliver it."""
        sequence = ticket.sequence
        try:
            if isinstance(result, Exception):
                raise result
            delivered = sequence.add_step(result)
            self._count(
                steps=1,
                tokens=len(delivered.token_ids),
                drafted=delivered.drafted,
                accepted=delivered.accepted,
            )
            ticket.tell(delivered)
        except BaseException as error:
            self._fail(ticket, error)
            return
        if sequence.finish_reason is not None:
            self._end(ticket)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """End a sequence after an error. `Cancelled`, which a callback may raise too, cancels it:
        `_wait_for_work` ends it then."""
        if isinstance(error, Cancelled):
            ticket.cancel()
        else:
            self._end(ticket, "failed", error)

    def _end(
        self, ticket: Ticket, outcome: Outcome = "ended", error: BaseException | None = None
    ) -> None:
        """End a sequence: free its memory, close its journal, deliver the last event. Never
        raises."""
        result = None
        try:
            with closing(ticket.sequence) as sequence:
                if outcome == "ended":
                    sequence.finish()
                if error is None:
                    result = sequence.result()
        except BaseException as fault:
            outcome = "failed"
            result = None
            error = error or fault
        if result is not None and outcome == "cancelled":
            result = replace(result, finish_reason="cancelled")
        self._masks.forget(ticket)
        with self._changed:
            self._tickets = [other for other in self._tickets if other is not ticket]
        self._count(**{outcome: 1})
        try:
            ticket.tell(None if error is None else failure(error), result)
        except BaseException as fault:  # the sequence is over anyway
            logger.warning("a callback failed at the end of its text (%s)", fault)

    def _count(self, **numbers: int) -> None:
        """Add to totals, by their names in `Figures`."""
        with self._changed:
            self._last_progress = monotonic()
            self._totals.update(numbers)
