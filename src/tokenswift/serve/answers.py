"""Answers: each begins, is written and ends; who reads it follows it meanwhile, or finds it when it
is over.

An `Answer` is one request and its text, fed by a ticket of the scheduler. One of the background
goes on whoever reads it, and with the next server; any other ends with its client. Everything here
happens on the event loop, but for what is said to run in a thread.

A response has a folder where the server has one: ``ID/answer.json``, a `Record`, and ``ID/0``, the
run of its text, which ``tokenswift resume`` knows as well. An id that is not of the server's form
is no answer's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace

import msgspec

from tokenswift.chat import thought_of
from tokenswift.chat.prompts import ids_of
from tokenswift.checks import counted, shown
from tokenswift.engine.failures import QueueFull
from tokenswift.engine.llm import LLM
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.ticket import Ticket
from tokenswift.sampling.masks import NoMask
from tokenswift.serve.answer import (
    GRAMMAR,
    RUN,
    Answer,
    Record,
    owner_of,
    stored_answer,
    stored_values,
)
from tokenswift.serve.base import Body
from tokenswift.serve.refusals import Refused, fault_of
from tokenswift.serve.schemas import Responses
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")
MOST_IDLE = 64  # responses in memory besides those under way
#: requests with a grammar that are looked at at once: one may take a core for seconds, and 4 GB
GRAMMARS_AT_ONCE = 2
RETRY_SECONDS = 0.5  # until a full queue is tried again
STALLED_SECONDS = 60.0  # without a step, while there is work: the server is not well


class Answers:
    """All answers of a server.

    Args:
        llm: the model that is served.
        scheduler: what runs its requests.
        settings: the limits, and where responses are stored.

    Attributes:
        known: responses in memory, by id, the one that a client asked for last at the end.
    """

    def __init__(self, llm: LLM, scheduler: Scheduler, settings: Settings) -> None:
        self.llm = llm
        self.scheduler = scheduler
        self.settings = settings
        self.known: OrderedDict[str, Answer] = OrderedDict()
        self.closing = False
        self._tokenizer = llm.source.tokenizer
        self._root = settings.folder
        self._tasks: set[asyncio.Task[None]] = set()
        self._grammars = asyncio.Semaphore(GRAMMARS_AT_ONCE)

    # ---- which one -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Go on with the answers of the background that an earlier server left, the oldest
        first."""
        left: list[Answer] = []
        for name in os.listdir(self._root) if self._root else ():
            answer = await asyncio.to_thread(self._stored, name, to_resume=True)
            if answer is not None:
                left.append(answer)
        left.sort(key=lambda answer: answer.record.created)
        for answer in left:
            self.known[answer.id] = answer
            answer.running = True
        if left:
            logger.info("resuming %s from %s", counted(len(left), "answer"), self._root)
            self._spawn(self._resume(left))

    async def find(self, name: str, owner: str) -> Answer | None:
        """A response by its id; None where its owner (`owner_of`) has none of it."""
        if name not in self.known:
            stored = await asyncio.to_thread(self._stored, name)
            if stored is None:
                return None
            self.known.setdefault(name, stored)
        answer = self.known[name]
        self._shed(name)
        return answer if answer.record.client == owner else None

    def _stored(self, name: str, to_resume: bool = False) -> Answer | None:
        """See `stored_answer`."""
        return stored_answer(self._root, name, self._tokenizer, to_resume)

    def _shed(self, newest: str) -> None:
        """Let go of the responses that were asked for least lately, and are not under way."""
        self.known.move_to_end(newest)
        idle = [answer.id for answer in self.known.values() if not answer.running]
        for name in idle[: max(0, len(self.known) - MOST_IDLE)]:
            del self.known[name]

    async def _before(self, body: Body, owner: str) -> list[dict[str, object]]:
        """The messages of the response that a body goes on from, and of those before it.

        Raises:
            Refused: there is none, or it has not ended.
        """
        name = body.value_of("previous_response_id")
        if not isinstance(name, str):
            return []
        answer = await self.find(name, owner)
        if answer is None or answer.record.state != "done":
            text = f"there is no response {shown(name)} that has ended; valid: the id of one"
            raise Refused(400, text, "previous_response_id", "previous_response_not_found")
        return answer.messages

    # ---- running ---------------------------------------------------------------------------------

    async def begin_all(self, body: Body, client: str) -> list[Answer]:
        """The answers to a request, one for each text that it asks for. The first begins now, the
        others while at most `Scheduler.at_once` of them are under way.

        Args:
            client: the API key that was shown, "" without one.
        Raises:
            InputError, RunError, Refused: one of them cannot, and nothing of them is left.
        """
        first, *others = await asyncio.to_thread(body.each_text)
        await asyncio.to_thread(self._check, others)
        answer = await self.begin(first, client)
        answers = [answer]
        room = asyncio.Semaphore(max(1, self.scheduler.at_once - 1))
        for one in others:
            name = one.id_prefix + secrets.token_hex(16)
            record = msgspec.structs.replace(answer.record, id=name, prompt_tokens=0, state="open")
            answers.append(Answer(record, one, self._tokenizer, None))
            answers[-1].running = True
            self._spawn(self._begin_and_write(answers[-1], room))
        return answers

    def _check(self, bodies: Sequence[Body]) -> None:
        """Check the prompts of several texts, before any is written; in a thread.

        Raises:
            InputError: naming the prompt that is wrong, by its number.
        """
        number = 0
        for body in bodies:
            if body.sample:
                continue
            number += 1
            try:
                body.request(self.llm, self.settings, 0)
            except InputError as error:
                fault = body.in_field_names(error)
                text = re.sub(r"^prompt\b", f"prompt[{number}]", str(fault))
                raise InputError(text, fault.field) from error

    async def _begin_and_write(self, answer: Answer, room: asyncio.Semaphore) -> None:
        """Begin one of several texts as soon as there is room for it, and write it."""
        async with room:
            ticket = await self._begin_when_free(answer)
            if ticket is not None and answer.is_stopped:
                ticket.cancel()
            if ticket is not None:
                await self._write(answer, ticket)
            elif not answer.done:
                await self._finish(answer, "open" if self.closing else "cancelled")

    async def _begin_when_free(self, answer: Answer) -> Ticket | None:
        """Begin an answer once the queue has room for it; None: it does not begin."""
        while not (self.closing or answer.is_stopped):
            try:
                async with self._grammars if answer.body.is_bound else nullcontext():
                    return await asyncio.to_thread(self._begin, answer)
            except QueueFull:
                await asyncio.sleep(RETRY_SECONDS)
            except Refused:
                return None
            except (InputError, RunError) as error:
                answer.status = 400 if isinstance(error, InputError) else 500
                await self._finish(answer, "failed", str(error))
                return None
        return None

    async def begin(self, body: Body, client: str) -> Answer:
        """An answer to a request for one text, which begins now.

        Args:
            client: the API key that was shown, "" without one.
        Raises:
            InputError, RunError, Refused: it cannot, and nothing of it is left.
        """
        values = await asyncio.to_thread(stored_values, body)
        name = body.id_prefix + secrets.token_hex(16)
        record = Record(
            id=name,
            created=time.time(),
            body=values,
            seed=secrets.randbits(31),
            client=owner_of(client),
        )
        record.before = await self._before(body, record.client)
        answer = Answer(record, body, self._tokenizer, self._root)
        try:
            # requests without a grammar do not wait for those with one
            async with self._grammars if body.is_bound else nullcontext():
                ticket = await asyncio.to_thread(self._begin, answer)
        except BaseException:
            await answer.forget()
            raise
        self._spawn(self._write(answer, ticket))
        if isinstance(body, Responses):  # the others nobody can ask for
            self.known[name] = answer
            self._shed(name)
        return answer

    def _begin(self, answer: Answer) -> Ticket:
        """Hand the text to the scheduler; in a thread.

        Raises:
            InputError, RunError, Refused: it is not taken.
        """
        body = answer.body
        try:
            ticket = self._submit_with_tools(answer)
        except InputError as error:
            raise body.in_field_names(error, answer.record.before) from error
        answer.running = True
        return ticket

    def _submit_with_tools(self, answer: Answer) -> Ticket:
        """`_submit`; tools whose schemas no grammar can hold are offered with any JSON object."""
        try:
            return self._submit(answer)
        except InputError as error:
            if error.field != "grammar":
                raise
            if not answer.body.unbind_tools(self.llm.resources.grammars):
                raise
        return self._submit(answer)

    def _submit(self, answer: Answer) -> Ticket:
        """Make the request of an answer, and queue it.

        Raises:
            InputError, RunError, Refused: it is not taken.
        """
        record = answer.record
        body = answer.body
        is_new = not record.prompt_tokens
        if is_new:  # what an earlier server has begun is resumed as it was
            self.settings.check_strategy(body.own_settings.get("strategy"))
        request = body.request(self.llm, self.settings, record.seed, record.before)
        record.thought = ""
        if body.kind in ("chat", "response"):
            record.thought = thought_of(self._tokenizer, ids_of(request.prompt))
        answer.read_calls()
        if self.closing or self.scheduler.is_closed:
            text = "the server is shutting down, or can no longer generate (its log says why)"
            raise Refused(503, f"{text}; valid: another try once it is back")
        record.prompt_tokens = len(request.prompt)
        if body.value_of("echo"):
            answer.prompt = ids_of(request.prompt)
        if answer.folder is not None:
            if is_new:
                answer.save()
            request = replace(request, run_dir=answer.folder / RUN)
        owner = "" if self.settings.share_prefixes else record.client
        ticket = self.scheduler.submit(request, owner)
        answer.ticket = ticket
        return ticket

    async def _resume(self, left: list[Answer]) -> None:
        """Go on with one after the other, as the queue has room."""
        for answer in left:
            while not (self.closing or answer.done or answer.ticket):
                try:
                    await asyncio.to_thread(self._begin, answer)
                except (QueueFull, Refused):
                    await asyncio.sleep(RETRY_SECONDS)
                except (InputError, RunError) as error:
                    await self._finish(answer, "failed", str(error))
            if answer.ticket and not answer.done:
                self._spawn(self._write(answer, answer.ticket))
            else:  # it was cancelled meanwhile, or the server ends
                answer.stop()
                answer.running = False
                answer.tell()

    async def _write(self, answer: Answer, ticket: Ticket) -> None:
        """Take the steps of an answer until it has ended. What ends with the server stays open."""
        try:
            async for step in ticket:
                answer.take(step)
                if answer.is_late:
                    ticket.cancel()
            result = ticket.result
        except Exception as error:
            await self._fail(answer, error)
            return
        if result.finish_reason != "cancelled" or answer.is_late:
            answer.end(result)
            await self._finish(answer, "done")
        else:
            await self._finish(answer, "open" if self.closing else "cancelled")

    async def _fail(self, answer: Answer, error: Exception) -> None:
        """End an answer whose text failed."""
        if not isinstance(error, InputError | RunError):
            logger.error("%s failed", answer.id, exc_info=error)
        fault = fault_of(error, answer.body.bad_words)
        answer.status = 500 if fault is None else 400
        reason = " ".join(str(fault or error).split()) or type(error).__name__
        # a client can do something with the text so far; a response has it anyway
        if isinstance(fault, NoMask) and answer.pieces and not isinstance(answer.body, Responses):
            answer.reason = GRAMMAR
            await self._finish(answer, "done", reason)
            return
        await self._finish(answer, "failed", reason)

    async def _finish(self, answer: Answer, state: str, error: str = "") -> None:
        """Nothing more comes of an answer here. Where the disk says no it stays open there, and the
        next server goes on with it."""
        answer.record.state = state
        answer.record.error = error
        try:
            await asyncio.to_thread(answer.save)
        except RunError as failed:
            logger.warning("%s", failed)
        answer.running = False  # not before: who deletes it waits until nothing more is written
        answer.tell()

    async def cancel(self, answer: Answer) -> None:
        """Stop an answer for good."""
        if answer.ticket is not None:
            answer.stop()
            await answer.wait()
        if not answer.done:
            await self._finish(answer, "cancelled")

    async def delete(self, answer: Answer) -> None:
        """Stop an answer and forget it, its folder too."""
        await self.cancel(answer)
        self.known.pop(answer.id, None)
        await answer.forget()

    async def close(self) -> None:
        """End everything between two steps; what is open goes on with the next server on the
        folder."""
        self.closing = True
        await asyncio.to_thread(self.scheduler.close)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def state(self) -> str:
        """Whether requests are taken and answers written, in a word; "ok" where they are."""
        if self.closing:
            return "ending"
        if self.scheduler.is_closed:
            return "failed"
        return "stalled" if self.scheduler.stalled > STALLED_SECONDS else "ok"

    @property
    def is_busy(self) -> bool:
        """Whether an answer is written, or waits."""
        return bool(self._tasks)

    @property
    def left(self) -> int:
        """Answers that the next server goes on with."""
        return sum(
            answer.folder is not None and answer.background and not answer.done
            for answer in self.known.values()
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
