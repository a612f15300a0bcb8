"""Answers: each begins, is written and ends; who reads it follows it meanwhile, or finds it when it is over.

An `Answer` is one request and its text, fed by a ticket of the scheduler. One of the background goes on
whoever reads it, and with the next server; any other ends with its client. Everything here happens on the
event loop, but for what is said to run in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec

from tokenswift.chat import Calls, message_of, thought_of
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import QueueFull
from tokenswift.runs.journal import RunState, sources_of
from tokenswift.sampling.choice import RefusedRow
from tokenswift.sampling.masks import LEFT, NoMask
from tokenswift.serve.guard import Refused
from tokenswift.serve.schemas import Body, Responses
from tokenswift.serve.settings import Settings
from tokenswift.serve.store import Record, Store
from tokenswift.types import InputError, RunError, Step, counted, shown

logger = logging.getLogger("tokenswift")
KEPT = 64  # responses in memory besides those under way
BOUND = 2  # requests with a grammar that are looked at at once: one may take a core for seconds, and 4 GB
AGAIN = 0.5  # seconds until a full queue is tried again
STRETCH = 0.02  # seconds of steps that one event of a stream tells of
STALLED = 60.0  # seconds without a step, while there is work, after which the server is not well


class Answer:
    """One request and its text.

    Args:
        record: what makes it again, and where it stands.
        body: of the request.
        calls: the tools that it may call, and how its text is read.

    Attributes:
        background: it goes on without a reader.
        ticket: of its text, once it is with the scheduler.
        running: more may come of it here.
        kept: it has a folder.
        status: of HTTP where it failed: 400 where another try would fail as well.
        pieces: the text that each token released.
        letters: who drafted each token (`spec.drafters.base`).
        steps: tokens and milliseconds of each step.
        tail: text that the end released.
        reason: why it ended, "" before.
    """

    def __init__(self, record: Record, body: Body, calls: Calls) -> None:
        self.record, self.body, self.calls = record, body, calls
        self.id, self.background = record.id, bool(body.given("background"))
        self.ticket: Any = None
        self.running, self.kept, self.status = False, False, 500
        self.pieces: list[str] = []
        self.letters: list[str] = []
        self.steps: list[tuple[int, float]] = []
        self.tail = self.reason = ""
        self._news = asyncio.Event()

    def recall(self, state: RunState) -> None:
        """Take what a journal holds."""
        self._release(state.text, state.chars)
        self.letters += state.sources
        self.steps += [(step[0], step[5]) for step in state.steps]
        if state.end is not None:
            self.reason, self.tail = state.end.reason, state.end.tail

    def take(self, step: Step) -> None:
        """One more step."""
        self._release(step.text, step.chars)
        self.letters += sources_of(step)
        self.steps.append((len(step.token_ids), round(1000 * step.seconds, 3)))
        self.tell()

    def _release(self, text: str, sizes: Sequence[int]) -> None:
        """Take the characters of some tokens."""
        at = 0
        for size in sizes:
            self.pieces.append(text[at : at + size])
            at += size

    @property
    def done(self) -> bool:
        """Whether it is as whole as it gets: finished, failed or cancelled."""
        return self.record.state != "open"

    @property
    def text(self) -> str:
        """The text so far, with what the end released."""
        return "".join(self.pieces) + self.tail

    @property
    def message(self) -> dict[str, Any]:
        """The text as a message of a conversation."""
        return message_of(*self.calls.read(self.text, self.id))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Of a response: the conversation up to its end, without its instructions."""
        body: Any = self.body
        return [*self.record.before, *body.conversation(), self.message]

    def stop(self) -> None:
        """End its steps."""
        if self.ticket is not None:
            self.ticket.cancel()

    def tell(self) -> None:
        """Wake the readers."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, pause: float) -> AsyncIterator[tuple[int, int] | None]:
        """Stretches of tokens as they come, from one to another; None where nothing came for ``pause``
        seconds. Ends when nothing more comes. Steps within `STRETCH` go out together: an event costs about a
        tenth of one."""
        start = 0
        while True:
            news, over, end = self._news, not self.running, len(self.pieces)
            if start < end:
                yield start, end
            if over:
                return
            if start < end:
                start = end
                await asyncio.sleep(STRETCH)
            try:
                async with asyncio.timeout(pause):
                    await news.wait()
            except TimeoutError:
                yield None

    async def wait(self) -> None:
        """Until nothing more comes."""
        while self.running:
            await self._news.wait()


class Answers:
    """All answers of a server.

    Args:
        llm: the ``LLM``.
        scheduler: an `engine.scheduler.Scheduler` of it.
        settings: the limits.
        store: where responses are kept.

    Attributes:
        known: responses in memory, by id, the one asked for last at the end.
    """

    def __init__(self, llm: Any, scheduler: Any, settings: Settings, store: Store) -> None:
        self.llm, self.scheduler, self.settings, self.store = llm, scheduler, settings, store
        self.known: OrderedDict[str, Answer] = OrderedDict()
        self.closing = False
        self._codec = llm.source.codec
        self._tasks: set[asyncio.Task[None]] = set()
        self._bound = asyncio.Semaphore(BOUND)

    # ---- which one ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Go on with the answers of the background that an earlier server left."""
        records = await asyncio.to_thread(list, self.store.records())
        records = [one for one in records if one.state == "open" and one.body.get("background")]
        left = [found for one in records if (found := await asyncio.to_thread(self._read, one)) is not None]
        for answer in left:
            self.known[answer.id], answer.running = answer, True
        if left:
            logger.info("resuming %s from %s", counted(len(left), "answer"), self.store.folder)
            self._spawn(self._resume(left))

    async def find(self, name: str, owner: str) -> Answer | None:
        """A response by its id; None where its owner (`owner_of`) has none of it."""
        if name not in self.known:
            record = await asyncio.to_thread(self.store.read, name)
            found = None if record is None else await asyncio.to_thread(self._read, record)
            if found is None:
                return None
            self.known.setdefault(name, found)
        answer = self.known[name]
        self._shed(name)
        return answer if answer.record.client == owner else None

    def _read(self, record: Record) -> Answer | None:
        """An answer of the store, as its journals have it; in a thread."""
        try:
            answer = self._answer(record, Responses.model_validate(record.body))
            if (state := self.store.state(record.id)) is not None:
                answer.recall(state)
        except ValueError as error:  # pydantic's and ours
            logger.warning("%s cannot be resumed: %s", record.id, " ".join(str(error).split())[:300])
            return None
        return answer

    def _answer(self, record: Record, body: Body) -> Answer:
        made = Answer(record, body, Calls.of(body.tools_asked(), self._codec, record.thought))
        made.kept = self.store.folder is not None and isinstance(body, Responses) and body.store is not False
        return made

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

    # ---- running --------------------------------------------------------------------------------

    async def make(self, body: Body, client: str) -> Answer:
        """An answer to a request, which begins now.

        Args:
            client: the API key that was shown, "" without one.
        Raises:
            InputError: naming what is wrong with the body, or the scheduler refuses it.
        """
        values = body.model_dump(include=set(type(body).model_fields), exclude_none=True)
        try:
            msgspec.json.encode(values)
        except (ValueError, OverflowError, RecursionError) as error:  # lone surrogates, numbers of any size
            raise InputError(f"the body cannot be stored ({error}); valid: whole characters") from error
        name, seed = body.begins + secrets.token_hex(16), secrets.randbits(31)
        record = Record(name, int(time.time()), values, seed, client=owner_of(client))
        record.before = await self._before(body, record.client)
        async with self._bound if body.is_bound else nullcontext():  # others do not wait for them
            answer = await asyncio.to_thread(self._begin, record, body)
        self._spawn(self._write(answer))
        if isinstance(body, Responses):  # the others nobody can ask for
            self.known[name] = answer
            self._shed(name)
        return answer

    def _begin(self, record: Record, body: Body) -> Answer:
        """Have a new answer run; in a thread.

        Raises:
            InputError, RunError: it cannot; nothing of it is left.
        """
        request = body.request(self.llm, self.settings, record.seed, record.before)
        record.prompt_tokens = len(request.prompt)
        prompt: Any = request.prompt
        record.thought = thought_of(self._codec, prompt) if body.kind != "completion" else ""
        answer = self._answer(record, body)
        try:
            if answer.kept:
                self.store.write(record)
            self._submit(answer, request)
        except BaseException:
            if answer.kept:
                self.store.remove(answer.id)
            raise
        return answer

    async def _resume(self, left: list[Answer]) -> None:
        """Go on with one after the other, as the queue has room."""
        for answer in left:
            while not (self.closing or answer.done or answer.ticket):
                try:
                    await asyncio.to_thread(self._submit, answer)
                except QueueFull:
                    await asyncio.sleep(AGAIN)
                except Refused:  # it stays open
                    break
                except (InputError, RunError) as error:
                    await self._settle(answer, "failed", str(error))
            if answer.ticket and not answer.done:
                self._spawn(self._write(answer))
            else:  # it was cancelled meanwhile, or the server ends
                answer.stop()
                answer.running = False
                answer.tell()

    def _submit(self, answer: Answer, request: Request | None = None) -> None:
        """Hand the text to the scheduler; in a thread.

        Raises:
            InputError, RunError, Refused: it is not taken.
        """
        record, body = answer.record, answer.body
        request = request or body.request(self.llm, self.settings, record.seed, record.before)
        if answer.kept:
            request = replace(request, run_dir=self.store.run_dir(answer.id))
        if self.closing or self.scheduler.is_closed:
            text = "the server is shutting down, or can no longer generate (its log says why)"
            raise Refused(503, f"{text}; valid: another try once it is back")
        owner = "" if self.settings.share_prefixes else record.client
        answer.ticket, answer.running = self.scheduler.submit(request, owner), True

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
        """Nothing more comes of an answer here. Where the disk says no it stays open there, and the next
        server finds it whole."""
        answer.record.state, answer.record.error = state, error
        try:
            if answer.kept:
                await asyncio.to_thread(self.store.write, answer.record)
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
        if answer.kept:
            await asyncio.to_thread(self.store.remove, answer.id)

    async def close(self) -> None:
        """End everything between two steps; what is open goes on with the next server on the folder."""
        self.closing = True
        await asyncio.to_thread(self.scheduler.close)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
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
        """Answers that the next server goes on with."""
        return sum(one.kept and one.background and not one.done for one in self.known.values())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def owner_of(key: str) -> str:
    """Whose answers are those of a key, without the key; "" where none is asked for."""
    return hashlib.sha256(f"client\0{key}".encode()).hexdigest() if key else ""


def fault_of(error: BaseException, bad_words: Sequence[str] | None) -> BaseException | None:
    """What ended a text, where its request is to blame: another try would end as well. None: it is not."""
    if isinstance(error, RefusedRow) and bad_words and error.args[1] != "NaN":
        return InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return error if isinstance(error, NoMask) and error.args[1] != LEFT else None
