"""Answers: each begins, is written and ends; who reads it follows it meanwhile, or finds it when it
is over.

An `Answer` is one request and its text, fed by a ticket of the scheduler. One of the background
goes on whoever reads it, and with the next server; any other ends with its client. Everything here
happens on the event loop, but for what is said to run in a thread.

A response has a folder where the server has one: ``ID/answer.json``, a `Record`, and ``ID/0``, the
    run of its
text, which ``tokenswift resume`` knows as well. An id that is not of the server's form is no
answer's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec

from tokenswift.chat import thought_of
from tokenswift.checks import counted, shown
from tokenswift.engine.failures import QueueFull
from tokenswift.runs.regular_files import read_regular
from tokenswift.sampling.masks import LEFT, NoMask
from tokenswift.sampling.sampler import RefusedRow
from tokenswift.serve.answer import RECORD, RUN, Answer, Record
from tokenswift.serve.base import Body
from tokenswift.serve.refusals import Refused
from tokenswift.serve.schemas import Responses
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")
IDS = re.compile(r"resp_[0-9a-f]{32}")
KEPT = 64  # responses in memory besides those under way
# requests with a grammar that are looked at at once: one may take a core for seconds, and 4 GB
BOUND = 2
AGAIN = 0.5  # seconds until a full queue is tried again
STALLED = 60.0  # seconds without a step, while there is work, after which the server is not well


class Answers:
    """All answers of a server.

    Args:
        llm: the ``LLM``.
        scheduler: an `engine.scheduler.Scheduler` of it.
        settings: the limits, and where responses are kept.

    Attributes:
        known: responses in memory, by id, the one asked for last at the end.
    """

    def __init__(self, llm: Any, scheduler: Any, settings: Settings) -> None:
        self.llm, self.scheduler, self.settings = llm, scheduler, settings
        self.known: OrderedDict[str, Answer] = OrderedDict()
        self.closing = False
        self._tokenizer, self._root = llm.source.tokenizer, settings.folder
        self._tasks: set[asyncio.Task[None]] = set()
        self._bound = asyncio.Semaphore(BOUND)

    # ---- which one -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Go on with the answers of the background that an earlier server left, the oldest
        first."""
        names = os.listdir(self._root) if self._root else []
        found = [one for name in names if (one := await asyncio.to_thread(self._read, name, True))]
        left = sorted(found, key=lambda one: one.record.created)
        for answer in left:
            self.known[answer.id], answer.running = answer, True
        if left:
            logger.info("resuming %s from %s", counted(len(left), "answer"), self._root)
            self._spawn(self._resume(left))

    async def find(self, name: str, owner: str) -> Answer | None:
        """A response by its id; None where its owner (`owner_of`) has none of it."""
        if name not in self.known:
            found = await asyncio.to_thread(self._read, name)
            if found is None:
                return None
            self.known.setdefault(name, found)
        answer = self.known[name]
        self._shed(name)
        return answer if answer.record.client == owner else None

    def _read(self, name: str, to_resume: bool = False) -> Answer | None:
        """An answer from its folder, as its journal has it; None where there is none that can be
        read, or none that is to be resumed; in a thread."""
        if self._root is None or not IDS.fullmatch(name):
            return None
        try:
            record = msgspec.json.decode(read_regular(self._root / name / RECORD), type=Record)
            body = Responses.model_validate(record.body)
            if record.id != name or (
                to_resume and not (record.state == "open" and body.background)
            ):
                return None
            answer = Answer(record, body, self._tokenizer, self._root)
            answer.recall()
            answer.read_calls()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # msgspec's, pydantic's and ours
            said = " ".join(str(error).split())[:300]
            logger.warning("%s cannot be read (%s); it is left alone", self._root / name, said)
            return None
        return answer

    def _shed(self, newest: str) -> None:
        """Let go of the responses that were asked for least lately, and are not under way."""
        self.known.move_to_end(newest)
        idle = [answer.id for answer in self.known.values() if not answer.running]
        for name in idle[: max(0, len(self.known) - KEPT)]:
            del self.known[name]

    async def _before(self, body: Body, owner: str) -> list[dict[str, Any]]:
        """The messages of the response that a body goes on from, and of those before it.

        Raises:
            Refused: there is none, or it has not ended.
        """
        name = body.given("previous_response_id")
        if name is None:
            return []
        answer = await self.find(name, owner)
        if answer is None or answer.record.state != "done":
            text = f"there is no response {shown(name)} that has ended; valid: the id of one"
            raise Refused(400, text, "previous_response_id", "previous_response_not_found")
        return answer.messages

    # ---- running ---------------------------------------------------------------------------------

    async def make(self, body: Body, client: str) -> Answer:
        """An answer to a request, which begins now.

        Args:
            client: the API key that was shown, "" without one.
        Raises:
            InputError, RunError, Refused: it cannot, and nothing of it is left.
        """
        values = await asyncio.to_thread(stored_values, body)
        name, seed = body.begins + secrets.token_hex(16), secrets.randbits(31)
        record = Record(name, time.time(), values, seed, client=owner_of(client))
        record.before = await self._before(body, record.client)
        answer = Answer(record, body, self._tokenizer, self._root)
        try:
            async with (
                self._bound if body.is_bound else nullcontext()
            ):  # others do not wait for them
                await asyncio.to_thread(self._begin, answer)
        except BaseException:
            await answer.forget()
            raise
        self._spawn(self._write(answer))
        if isinstance(body, Responses):  # the others nobody can ask for
            self.known[name] = answer
            self._shed(name)
        return answer

    def _begin(self, answer: Answer) -> None:
        """Hand the text to the scheduler; in a thread.

        Raises:
            InputError, RunError, Refused: it is not taken.
        """
        body = answer.body
        try:
            try:
                self._submit(answer)
            except InputError as error:
                compiler = self.llm.resources.grammars
                if error.field != "grammar" or not body.unbind_tools(compiler):
                    raise
                self._submit(answer)
        except InputError as error:
            raise body.in_field_names(error, answer.record.before) from error
        answer.running = True

    def _submit(self, answer: Answer) -> None:
        """Make the request of an answer, and queue it.

        Raises:
            InputError, RunError, Refused: it is not taken.
        """
        record, body = answer.record, answer.body
        is_new = not record.prompt_tokens
        if is_new:  # what an earlier server has begun is resumed as it was
            self.settings.check_strategy(body.own.get("strategy"))
        request = body.request(self.llm, self.settings, record.seed, record.before)
        prompt: Any = request.prompt
        record.thought = thought_of(self._tokenizer, prompt) if body.kind != "completion" else ""
        answer.read_calls()
        if self.closing or self.scheduler.is_closed:
            text = "the server is shutting down, or can no longer generate (its log says why)"
            raise Refused(503, f"{text}; valid: another try once it is back")
        record.prompt_tokens = len(prompt)
        if answer.folder is not None:
            if is_new:
                answer.save()
            request = replace(request, run_dir=answer.folder / RUN)
        owner = "" if self.settings.share_prefixes else record.client
        answer.ticket = self.scheduler.submit(request, owner)

    async def _resume(self, left: list[Answer]) -> None:
        """Go on with one after the other, as the queue has room."""
        for answer in left:
            while not (self.closing or answer.done or answer.ticket):
                try:
                    await asyncio.to_thread(self._begin, answer)
                except (QueueFull, Refused):
                    await asyncio.sleep(AGAIN)
                except (InputError, RunError) as error:
                    await self._settle(answer, "failed", str(error))
            if answer.ticket and not answer.done:
                self._spawn(self._write(answer))
            else:  # it was cancelled meanwhile, or the server ends
                answer.stop()
                answer.running = False
                answer.tell()

    async def _write(self, answer: Answer) -> None:
        """Take the steps of an answer until it has ended. What ends with the server stays open."""
        state = error = ""
        try:
            async for step in answer.ticket:
                answer.take(step)
            result = answer.ticket.result
            if result.finish_reason != "cancelled":
                answer.tail, answer.reason = result.text[len(answer.text) :], result.finish_reason
                state = "done"
        except Exception as failed:
            if not isinstance(failed, InputError | RunError):
                logger.error("%s failed", answer.id, exc_info=failed)
            fault = fault_of(failed, answer.body.bad_words)
            answer.status = 500 if fault is None else 400
            state, error = "failed", " ".join(str(fault or failed).split()) or type(failed).__name__
        await self._settle(answer, state or ("open" if self.closing else "cancelled"), error)

    async def _settle(self, answer: Answer, state: str, error: str = "") -> None:
        """Nothing more comes of an answer here. Where the disk says no it stays open there, and the
        next server finds it whole."""
        answer.record.state, answer.record.error = state, error
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
            await self._settle(answer, "cancelled")

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
        return "stalled" if self.scheduler.stalled > STALLED else "ok"

    @property
    def left(self) -> int:
        """Answers that the next server goes on with."""
        return sum(
            one.folder is not None and one.background and not one.done
            for one in self.known.values()
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def stored_values(body: Body) -> dict[str, object]:
    """What makes a body again, as JSON values; in a thread, as it may take a while.

    Raises:
        InputError: it cannot be written as JSON.
    """
    values = body.model_dump(include=set(type(body).model_fields), exclude_none=True)
    try:
        msgspec.json.encode(values)
    except (ValueError, OverflowError, RecursionError) as error:  # lone surrogates, large numbers
        reason = f"the body cannot be stored ({error})"
        raise InputError(f"{reason}; valid: whole characters") from error
    return values


def owner_of(key: str) -> str:
    """Whose answers are those of a key, without the key; "" where none is asked for."""
    return hashlib.sha256(f"client\0{key}".encode()).hexdigest() if key else ""


def fault_of(error: BaseException, bad_words: Sequence[str] | None) -> BaseException | None:
    """What ended a text, where its request is to blame: another try would end as well. None: it is
    not."""
    if isinstance(error, RefusedRow) and bad_words and error.fault != "NaN":
        return InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return error if isinstance(error, NoMask) and error.reason != LEFT else None
