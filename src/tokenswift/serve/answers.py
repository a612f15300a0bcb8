"""Answers under way and finished ones: who reads them, what stops them, how they go on.

An `Answer` is one request; each of its texts is a `Part`, fed by a ticket of the scheduler. Everything here
happens on the event loop, but for what is said to run in a thread. A reader asks for the text from a
position on, in tokens, and gets the rest in stretches, whatever was stopped and begun again meanwhile: the
tokens of a seed are always the same ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from tokenswift.chat.thought import thought_of
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import QueueFull
from tokenswift.runs.state import RunState
from tokenswift.serve.answer import Answer, Part
from tokenswift.serve.echo import echoes
from tokenswift.serve.errors import Refused, fault_of
from tokenswift.serve.metrics import Measures
from tokenswift.serve.schemas import KINDS, Body
from tokenswift.serve.settings import Settings
from tokenswift.serve.shelf import Shelf
from tokenswift.serve.store import Record, Store, brief
from tokenswift.types import InputError, RunError, Step
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
BOUND = (
    2  # requests with a grammar that are looked at concurrently: one may take a core for seconds, and 4 GB
)
AGAIN = 0.5  # seconds until a full queue is tried again
#: why an answer was stopped
GONE, CANCELLED, ENDS = "its client is gone", "it was cancelled", "the server ends"
LATE = "the answer took longer than the server's --max-seconds"
STALLED = 60.0  # seconds without a step, while there is work, after which the server is not well


class Answers:
    """All answers of a server.

    Args:
        llm: the ``LLM``.
        scheduler: an `engine.scheduler.Scheduler` of it.
        settings: the limits.
        store: where answers are kept; None: in memory alone.
        measures: counts what happens.
    """

    def __init__(
        self, llm: Any, scheduler: Any, settings: Settings, store: Store | None, measures: Measures
    ) -> None:
        self.llm, self.scheduler, self.settings = llm, scheduler, settings
        self.store, self.measures = store, measures
        self.closing = False
        self.shelf = Shelf(store, llm.source.codec)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bound = asyncio.Semaphore(BOUND)

    # ---- which one ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Go on with what an earlier server left: answers in the background at once, the others when they
        are asked for."""
        left = await self.shelf.left()
        if left:
            logger.info("going on with %s of %s", counted(len(left), "answer"), self.shelf.disk.folder)
            self._spawn(self._go_on(left))

    async def _go_on(self, left: list[Answer]) -> None:
        """Begin one after the other, as the queue has room."""
        for answer in left:
            while not self.closing:
                try:
                    await self._begin(answer)
                    break
                except QueueFull:
                    await asyncio.sleep(AGAIN)

    async def make(self, kind: str, body: Body, client: str) -> Answer:
        """A new answer to a request.

        Args:
            kind: a name of `schemas.KINDS`.
            client: the API key that was shown, "" without one.
        Raises:
            InputError: naming what is wrong with the body.
        """
        body.check_served()
        known = body.model_dump(include=set(type(body).model_fields), exclude_none=True)
        try:
            msgspec.json.encode(known)
        except (ValueError, OverflowError, RecursionError) as error:  # lone surrogates, numbers of any size
            raise InputError(f"the body cannot be kept ({error}); valid: whole characters") from error
        name = KINDS[kind][1] + secrets.token_hex(16)
        seed = secrets.randbits(31)
        record = Record(name, kind, int(time.time()), known, seed, [0], client=owner_of(client))
        answer = Answer(record, body)
        try:
            self.shelf.add(answer)
            async with answer.lock:
                record.before = await self._before(body, record.client)
                async with self._bound if body.is_bound else nullcontext():  # others do not wait for them
                    requests = await asyncio.to_thread(self._requests, record, body)
                record.prompt_tokens = [len(request.prompt) for request in requests]
                if body.is_chat:
                    record.thought = thought_of(self.llm.source.codec, self.llm.encode(requests[0].prompt))
                self.shelf.know(answer)
                found = await asyncio.to_thread(echoes, body, requests, self.llm.source.codec)
                answer.parts = [Part(i, record.prompt_tokens[i], echo) for i, echo in enumerate(found)]
                answer.requests = requests
                await self.shelf.write(answer)
        except BaseException:
            self.shelf.forget(answer)
            raise
        return answer

    async def _before(self, body: Body, client: str) -> list[dict[str, Any]]:
        """The messages of the response that a body goes on from, and of those before it.

        Raises:
            Refused: there is none, or it has not ended.
        """
        name = getattr(body, "previous_response_id", None)
        if name is None:
            return []
        answer = await self.shelf.get(name)
        if answer is None or answer.record.kind != "response" or answer.record.client != client:
            text, code = f"there is no response {name[:80]!r}; valid: the id of one", "not_found"
            raise Refused(400, text, "previous_response_id", f"previous_response_{code}")
        if answer.record.state != "done":
            text = f"the response {name[:80]!r} has not ended; valid: one that has"
            raise Refused(400, text, "previous_response_id")
        return answer.messages

    def _requests(self, record: Record, body: Body) -> list[Request]:
        """What a body asks for; in a thread.

        Raises:
            InputError: naming the field that is wrong.
        """
        try:
            return body.requests(self.llm, self.settings, record.seed, record.before)
        except InputError as error:
            raise body.in_own_words(error) from error
        except RecursionError as error:
            raise InputError("the body is nested too deeply; valid: few levels") from error

    # ---- running --------------------------------------------------------------------------------

    async def attach(self, answer: Answer) -> None:
        """Somebody reads the answer from now on: it is begun, or resumed. `detach` has to follow, but
        not where this raises.

        Raises:
            InputError: the scheduler refuses it; a new answer is forgotten then.
        """
        answer.readers += 1
        try:
            await self.begin(answer)
        except BaseException:
            self.detach(answer)
            raise

    def detach(self, answer: Answer) -> None:
        """A reader is gone; the last one of an answer that is not of the background ends its steps."""
        answer.readers -= 1
        self._leave(answer)

    async def begin(self, answer: Answer) -> None:
        """See that an answer is under way, unless it is done. Raises as `attach`."""
        # a task of its own: a client that goes away meanwhile ends the wait, not the beginning
        await asyncio.shield(self._spawn(self._begin(answer)))

    async def cancel(self, answer: Answer) -> None:
        """Stop an answer for good."""
        async with answer.lock:  # not while it is begun
            self._stop(answer, CANCELLED)
            if answer.running:
                await answer.wait()
            if not answer.done:
                await self._settle(answer, "cancelled")

    async def delete(self, answer: Answer) -> None:
        """Stop an answer and forget it, its folder too."""
        await self.cancel(answer)
        await self.shelf.remove(answer)

    async def close(self) -> None:
        """Stop everything between two steps; what is open goes on with the next server on the folder."""
        self.closing = True
        for answer in list(self.shelf.answers.values()):
            self._stop(answer, ENDS)
        await asyncio.to_thread(self.scheduler.close)
        while self._tasks:  # what begins answers, and what ends them
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.store is not None:
            self.store.close()

    def state(self) -> str:
        """Whether requests are taken and answers written, in a word; "ok" where they are."""
        if self.closing:
            return "ending"
        if self.scheduler.is_closed:
            return "failed"
        return "stalled" if self.scheduler.stalled > STALLED else "ok"

    @property
    def left(self) -> int:
        """Answers that are kept and not whole."""
        return sum(answer.kept and not answer.done for answer in self.shelf.answers.values())

    def _leave(self, answer: Answer) -> None:
        if not answer.readers and not answer.background:
            self._stop(answer, GONE)
        self.shelf.shed()

    def _stop(self, answer: Answer, why: str) -> None:
        """End its steps; its readers are told when they have ended."""
        if answer.running and not answer.stopped:
            answer.stopped = why
            for part in answer.parts:
                if part.ticket is not None:  # not yet over
                    part.ticket.cancel()

    async def _begin(self, answer: Answer) -> None:
        async with answer.lock:
            if answer.stopped:  # until its tickets have let go of their folders
                await answer.wait()
            if answer.done or answer.running:
                return
            try:
                tickets = await self._submitted(answer)
            except (InputError, RunError, Refused) as error:
                if not answer.begun:
                    await self.shelf.remove(answer)
                    raise
                if isinstance(error, QueueFull | Refused):
                    raise
                await self._settle(answer, "failed", str(error))
                return
            answer.stopped, answer.running, answer.begun = "", True, True
            loop = asyncio.get_running_loop()
            for part, (ticket, state) in zip(answer.parts, tickets, strict=True):
                part.rewind(state)
                part.over, part.ticket = False, ticket
                ticket.on_event(partial(_pass_on, loop, partial(self._take, answer, part)))
            if self.settings.max_seconds:
                answer.timer = loop.call_later(self.settings.max_seconds, self._stop, answer, LATE)
            answer.tell()
        self._leave(answer)

    async def _submitted(self, answer: Answer) -> list[tuple[Any, RunState | None]]:
        """The texts' tickets, and what their journals hold.

        Raises:
            InputError, RunError: the scheduler refuses them.
            Refused: the server ends.
        """
        if not self.closing:
            try:
                return await asyncio.to_thread(self._submit, answer)
            except (InputError, RunError) as error:
                if not self.closing and not self.scheduler.is_closed:
                    if isinstance(error, RunError | QueueFull):
                        raise
                    raise answer.body.in_own_words(error) from error
        if not self.closing:
            raise Refused(503, "the server cannot write any more, its log says why; valid: another server")
        raise Refused(503, "the server ends; valid: another try when it is there again")

    def _submit(self, answer: Answer) -> list[tuple[Any, RunState | None]]:
        """Hand the texts to the scheduler; in a thread."""
        requests = answer.requests
        if requests is None:
            requests = self._requests(answer.record, answer.body)
        answer.requests = None
        owner = "" if self.settings.share_prefixes else answer.record.client
        made: list[tuple[Any, RunState | None]] = []
        try:
            for index, request in enumerate(requests):
                state = None
                if answer.kept:
                    state = self.shelf.disk.state(answer.id, index)
                    request = replace(request, run_dir=self.shelf.disk.run_dir(answer.id, index))
                made.append((self.scheduler.submit(request, owner), state))
        except BaseException:
            for ticket, _ in made:
                ticket.cancel()
            raise
        return made

    def _take(self, answer: Answer, part: Part, event: Step | BaseException | None) -> None:
        """What the scheduler tells of a text."""
        if isinstance(event, Step):
            part.take(event, answer.spell)
            self.measures.step(event)
            answer.tell()
        else:
            self._spawn(self._end(answer, part, event))

    async def _end(self, answer: Answer, part: Part, error: BaseException | None) -> None:
        """A text has ended: by itself, by an error, or because it was stopped."""
        if error is None:
            result = part.ticket.result
            if result.finish_reason != "cancelled":
                part.tail, part.reason = result.text[sum(map(len, part.pieces)) :], result.finish_reason
                part.prompt_logprobs = tuple(result.prompt_logprobs)
        elif not answer.stopped:
            if not isinstance(error, InputError | RunError):
                logger.error("%s failed", brief(answer.id), exc_info=error)
            if (fault := fault_of(error, answer.body.bad_words)) is not None:
                answer.status, error = 400, fault
            answer.failure = answer.failure or " ".join(str(error).split()) or type(error).__name__
        part.over, part.ticket = True, None
        if answer.over:
            answer.running = False
            if answer.timer is not None:
                answer.timer.cancel()
            if all(part.reason for part in answer.parts):
                await self._settle(answer, "done")
            elif answer.failure or answer.stopped == LATE:
                await self._settle(answer, "failed", answer.failure or LATE)
        elif answer.failure and not answer.stopped:  # the other texts of the request are not wanted alone
            self._stop(answer, GONE)
        answer.tell()

    async def _settle(self, answer: Answer, state: str, error: str = "") -> None:
        """An answer is as whole as it gets."""
        answer.record.state, answer.record.error = state, error
        answer.over_at = time.time()
        for part in answer.parts:
            part.over = True
        self.measures.answer(answer.record.kind, state)
        answer.tell()
        await self.shelf.settle(answer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._gone)
        return task

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, InputError | Refused):
            logger.error("the server's own work failed", exc_info=error)


def _pass_on(loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], event: Any) -> None:
    """From the scheduler's thread to the event loop's."""
    with suppress(RuntimeError):  # the loop is closed: nobody reads any more
        loop.call_soon_threadsafe(take, event)


def owner_of(key: str) -> str:
    """Whose answers are those of a key, without the key; "" where none is asked for."""
    return hashlib.sha256(f"client\0{key}".encode()).hexdigest() if key else ""
