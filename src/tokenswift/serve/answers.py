"""Answers under way and finished ones: who reads them, what stops them, how they go on.

An `Answer` is one request; each of its texts is a `Part`, fed by a ticket of the scheduler. Everything here
happens on the event loop, but for what is said to run in a thread. A reader gets the text in stretches,
whatever was stopped and begun again meanwhile: the tokens of a seed are always the same ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import msgspec

from tokenswift.chat.calls import Calls, call_id, message_of
from tokenswift.chat.tools import thought_of
from tokenswift.checks import shown
from tokenswift.engine.detokenize import token_bytes
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import QueueFull
from tokenswift.runs.state import RunState, sources_of
from tokenswift.serve.errors import Refused, fault_of
from tokenswift.serve.schemas import KINDS, Body
from tokenswift.serve.settings import Settings
from tokenswift.serve.store import Record, Store
from tokenswift.types import InputError, Logprob, RunError, Step
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
KEPT = 64  # answers in memory besides those under way and those that somebody reads
BOUND = 2  # requests with a grammar that are looked at at once: one may take a core for seconds, and 4 GB
AGAIN = 0.5  # seconds until a full queue is tried again
STRETCH = 0.02  # seconds of steps that one event of a stream tells of
STALLED = 60.0  # seconds without a step, while there is work, after which the server is not well
#: why an answer was stopped
GONE, CANCELLED, ENDS = "its client is gone", "it was cancelled", "the server is shutting down"


class Part:
    """One text of an answer.

    Attributes:
        pieces: the text that each token released.
        letters: who drafted each token (`spec.drafters.base`).
        steps: tokens and milliseconds of each step.
        logprobs: of each token, where they are asked for: its id, its place in the text, and what is told.
        tail: text that the end released.
        reason: why it ended, "" before.
    """

    def __init__(self, index: int, prompt_tokens: int) -> None:
        self.index, self.prompt_tokens = index, prompt_tokens
        self.ticket: Any = None
        self.rewind(None)

    def rewind(self, state: RunState | None) -> None:
        """Go back to what a journal holds, or to the beginning."""
        self.pieces: list[str] = []
        self.letters: list[str] = []
        self.steps: list[tuple[int, float]] = []
        self.logprobs: list[tuple[int, int, Logprob | None]] = []
        self.tail = self.reason = ""
        self._released = 0
        if state is None:
            return
        self._release(state.text, state.chars)
        self.letters = list(state.sources)
        self.steps += [(step[0], step[5]) for step in state.steps]
        if state.end is not None:
            self.reason, self.tail = state.end.reason, state.end.tail

    def take(self, step: Step) -> None:
        """One more step."""
        self.logprobs += zip(step.token_ids, step.begins, step.logprobs, strict=False)
        self.tail = step.text[self._release(step.text, step.chars) :]
        self.letters += sources_of(step)
        self.steps.append((len(step.token_ids), round(1000 * step.seconds, 3)))

    def _release(self, text: str, sizes: Sequence[int]) -> int:
        """Take the characters of some tokens; how many they are."""
        at = 0
        for size in sizes:
            self.pieces.append(text[at : at + size])
            at += size
        self._released += at
        return at

    @property
    def text(self) -> str:
        """The text so far, with what the end released."""
        return "".join(self.pieces) + (self.tail if self.reason else "")

    def told(self, start: int = 0) -> int:
        """Up to which token, from ``start`` on, log-probabilities may be told: tokens of a stop string, or of
        text that is still held back, are not."""
        size = self._released + (len(self.tail) if self.reason else 0)
        whole = self.reason not in ("", "stop")
        later = (i for i in range(start, len(self.logprobs)) if not whole and self.logprobs[i][1] >= size)
        return next(later, len(self.logprobs))


class Answer:
    """One request and its texts.

    Args:
        record: what makes it again.
        body: of the request.
        calls: the tools that it may call, and how its texts are read.
        spell: gives the bytes of tokens.

    Attributes:
        background: it goes on without a reader.
        readers: requests that wait for it now.
        running: its texts are with the scheduler; where it does not run, nothing more comes, for now.
        kept: it has a folder: what is stopped by the server's end goes on with the next one.
        stopped: why it was stopped, "" where it goes on or has ended.
        failure: what went wrong, "" where nothing did.
        status: of HTTP, of that: 400 where another try would fail as well.
        over_at: when it became whole, Unix time.
    """

    def __init__(self, record: Record, body: Body, calls: Calls, spell: Callable[[int], bytes]) -> None:
        self.record, self.body, self.calls, self.spell = record, body, calls, spell
        self.id, self.background = record.id, bool(body.given("background"))
        self.parts = [Part(i, tokens) for i, tokens in enumerate(record.prompt_tokens)]
        self.readers, self.status, self.failure, self.stopped = 0, 500, "", ""
        self.running = self.kept = False
        self.over_at: float | None = None
        self.lock = asyncio.Lock()
        self._news = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether it is as whole as it gets: finished, failed or cancelled."""
        return self.record.state != "open"

    def call_id(self, part: Part, index: int) -> str:
        """The id of a call in a text."""
        return call_id(f"{self.id}/{part.index}", index)

    def message(self, part: Part) -> dict[str, Any]:
        """A text as a message of a conversation."""
        said = self.calls.read(part.text)
        return message_of(said.text, said.tool_calls(f"{self.id}/{part.index}"), said.thought)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Of a response: the conversation up to its end, without its instructions."""
        body: Any = self.body
        return [*self.record.before, *body.conversation(), *map(self.message, self.parts)]

    def tell(self) -> None:
        """Wake the readers."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, pause: float) -> AsyncIterator[tuple[Part, int, int] | None]:
        """Stretches of tokens as they come; None where nothing came for ``pause`` seconds. Ends when nothing
        more comes.

        Steps that follow each other within `STRETCH` go out together: an event costs about a tenth of a step.
        """
        places = [0] * len(self.parts)
        loop = asyncio.get_running_loop()
        newest = loop.time() - STRETCH  # the first one goes out at once
        while True:
            if 0 < (rest := newest + STRETCH - loop.time()) and self.running:
                await asyncio.sleep(rest)
            news, over = self._news, not self.running
            for part in self.parts:
                at, end = places[part.index], len(part.pieces)
                if at < end:
                    places[part.index], newest = end, loop.time()
                    yield part, at, end
            if over:
                return
            if loop.time() >= newest + pause:
                newest = loop.time()
                yield None
            timer = loop.call_at(newest + pause, self.tell)  # lighter than a wait with a limit for each step
            await news.wait()
            timer.cancel()

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
        store: where answers are kept.

    Attributes:
        known: answers in memory, by id, the one asked for last at the end.
    """

    def __init__(self, llm: Any, scheduler: Any, settings: Settings, store: Store) -> None:
        self.llm, self.scheduler, self.settings, self.store = llm, scheduler, settings, store
        self.known: OrderedDict[str, Answer] = OrderedDict()
        self.closing = False
        self._codec = llm.source.codec
        self._spell = cache(partial(token_bytes, self._codec))  # as large as the vocabulary at most
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bound = asyncio.Semaphore(BOUND)

    # ---- which one ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Go on with what an earlier server left: answers in the background at once, the others when they
        are asked for."""
        records = await asyncio.to_thread(list, self.store.records())
        left = [record for record in records if record.state == "open" and record.body.get("background")]
        found = [answer for record in left if (answer := await self._read(record)) is not None]
        if found:
            logger.info("resuming %s from %s", counted(len(found), "answer"), self.store.folder)
            self._spawn(self._go_on(found))

    async def _go_on(self, left: list[Answer]) -> None:
        """Begin one after the other, as the queue has room."""
        for answer in left:
            while not self.closing:
                try:
                    await self._begin(answer)
                    break
                except QueueFull:
                    await asyncio.sleep(AGAIN)

    async def find(self, name: str, owner: str) -> Answer | None:
        """A response by its id; None where its owner (`owner_of`) has none of it."""
        if name not in self.known:
            record = await asyncio.to_thread(self.store.read, name)
            if name not in self.known and (record is None or await self._read(record) is None):
                return None
        answer = self.known[name]
        self.known.move_to_end(name)
        return answer if (answer.record.kind, answer.record.client) == ("response", owner) else None

    async def _read(self, record: Record) -> Answer | None:
        """An answer of the store, as its journals have it; it is not begun."""
        try:
            answer = self._made(record, KINDS[record.kind][0].model_validate(record.body))
            for part in answer.parts:
                part.rewind(await asyncio.to_thread(self.store.state, record.id, part.index))
        except (KeyError, ValueError) as error:  # pydantic's and ours
            why = " ".join(str(error).split())[:300]
            logger.warning("%s cannot be resumed: %s", record.id, why)
            return None
        answer.kept = True
        answer = self.known.setdefault(record.id, answer)
        self._shed()
        return answer

    def _made(self, record: Record, body: Body) -> Answer:
        return Answer(record, body, Calls.of(body.tools_asked(), self._codec, record.thought), self._spell)

    async def make(self, kind: str, body: Body, client: str) -> Answer:
        """A new answer to a request, which is read: `detach` has to follow. It has a folder unless it tells
        what no journal holds.

        Args:
            kind: a name of `schemas.KINDS`.
            client: the API key that was shown, "" without one.
        Raises:
            InputError: naming what is wrong with the body, or the scheduler refuses it.
        """
        body.check_served()
        values = body.model_dump(include=set(type(body).model_fields), exclude_none=True)
        try:
            msgspec.json.encode(values)
        except (ValueError, OverflowError, RecursionError) as error:  # lone surrogates, numbers of any size
            raise InputError(f"the body cannot be stored ({error}); valid: whole characters") from error
        name, seed = KINDS[kind][1] + secrets.token_hex(16), secrets.randbits(31)
        record = Record(name, kind, int(time.time()), values, seed, [0], client=owner_of(client))
        record.before = await self._before(body, record.client)
        async with self._bound if body.is_bound else nullcontext():  # others do not wait for them
            requests = await asyncio.to_thread(self._requests, record, body)
        record.prompt_tokens = [len(request.prompt) for request in requests]
        if body.is_chat:
            ids: Any = requests[0].prompt
            record.thought = thought_of(self._codec, ids)
        answer = self._made(record, body)
        stored = body.likely is None and body.given("store") is not False
        answer.kept = stored and self.store.folder is not None
        if answer.kept:
            await asyncio.to_thread(self.store.write, record)
        self.known[name] = answer
        await self.attach(answer, requests)
        return answer

    async def _before(self, body: Body, owner: str) -> list[dict[str, Any]]:
        """The messages of the response that a body goes on from, and of those before it.

        Raises:
            Refused: there is none, or it has not ended.
        """
        name = body.given("previous_response_id")
        if name is None:
            return []
        answer = await self.find(name, owner)
        if answer is None:
            text, code = f"there is no response {shown(name)}; valid: the id of one", "not_found"
            raise Refused(400, text, "previous_response_id", f"previous_response_{code}")
        if answer.record.state != "done":
            text = f"the response {shown(name)} has not ended; valid: one that has"
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

    def _shed(self) -> None:
        """Let go of the oldest answers that nobody reads."""
        idle = [a for a in self.known.values() if not a.readers and not a.running and not a.lock.locked()]
        for answer in idle[: max(0, len(self.known) - KEPT)]:
            self.known.pop(answer.id)

    # ---- running --------------------------------------------------------------------------------

    async def attach(self, answer: Answer, requests: list[Request] | None = None) -> None:
        """Somebody reads the answer from now on: it is begun, or resumed, unless it is done. `detach` has to
        follow, but not where this raises.

        Args:
            requests: of a new one, which is forgotten where this raises.
        Raises:
            InputError: the scheduler refuses it.
        """
        answer.readers += 1
        try:  # in a task of its own: a client that goes away meanwhile ends the wait, not the beginning
            await asyncio.shield(self._spawn(self._begin(answer, requests)))
        except BaseException:
            self.detach(answer)
            raise

    def detach(self, answer: Answer) -> None:
        """A reader is gone; the last one of an answer that is not of the background ends its steps."""
        answer.readers -= 1
        self._leave(answer)

    async def cancel(self, answer: Answer) -> None:
        """Stop an answer for good."""
        async with answer.lock:  # not while it is begun
            self._stop(answer, CANCELLED)
            await answer.wait()
            if not answer.done:
                await self._settle(answer, "cancelled")

    async def delete(self, answer: Answer) -> None:
        """Stop an answer and forget it, its folder too."""
        await self.cancel(answer)
        await self._forget(answer)

    async def close(self) -> None:
        """Stop everything between two steps; what is open goes on with the next server on the folder."""
        self.closing = True
        for answer in list(self.known.values()):
            self._stop(answer, ENDS)
        await asyncio.to_thread(self.scheduler.close)
        while self._tasks:  # what begins answers, and what ends them
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
        """Answers that are kept and not whole."""
        return sum(answer.kept and not answer.done for answer in self.known.values())

    def _leave(self, answer: Answer) -> None:
        if not answer.readers and not answer.background:
            self._stop(answer, GONE)
        self._shed()

    def _stop(self, answer: Answer, why: str) -> None:
        """End its steps; its readers are told when they have ended."""
        if answer.running and not answer.stopped:
            answer.stopped = why
            for part in answer.parts:
                part.ticket.cancel()

    async def _forget(self, answer: Answer) -> None:
        self.known.pop(answer.id, None)
        if answer.kept:
            await asyncio.to_thread(self.store.remove, answer.id)

    async def _begin(self, answer: Answer, requests: list[Request] | None = None) -> None:
        async with answer.lock:
            if answer.stopped:  # until its tickets have let go of their folders
                await answer.wait()
            if answer.done or answer.running:
                return
            try:
                tickets = await asyncio.to_thread(self._submit, answer, requests)
            except (InputError, RunError) as error:
                if requests is not None:
                    await self._forget(answer)
                if self.closing or self.scheduler.is_closed:
                    why = "is shutting down" if self.closing else "can no longer generate (see its log)"
                    raise Refused(503, f"the server {why}; valid: try again once it is back") from error
                if isinstance(error, QueueFull) or requests is not None:
                    raise
                await self._settle(answer, "failed", str(error))
                return
            answer.stopped, answer.running = "", True
            self.known.setdefault(answer.id, answer)  # others may have had it shed meanwhile
            for part, (ticket, state) in zip(answer.parts, tickets, strict=True):
                part.rewind(state)
                part.ticket = ticket
            self._spawn(self._write(answer))
        self._leave(answer)

    def _submit(self, answer: Answer, requests: list[Request] | None) -> list[tuple[Any, RunState | None]]:
        """Hand the texts to the scheduler, in a thread; their tickets, and what their journals hold.

        Raises:
            InputError, RunError: the scheduler refuses them.
        """
        if self.closing:
            raise RunError("the server is shutting down")
        requests = self._requests(answer.record, answer.body) if requests is None else requests
        owner = "" if self.settings.share_prefixes else answer.record.client
        made: list[tuple[Any, RunState | None]] = []
        try:
            for index, request in enumerate(requests):
                state = None
                if answer.kept:
                    state = self.store.state(answer.id, index)
                    request = replace(request, run_dir=self.store.run_dir(answer.id, index))
                made.append((self.scheduler.submit(request, owner), state))
        except BaseException as error:
            for ticket, _ in made:
                ticket.cancel()
            if isinstance(error, InputError) and not isinstance(error, QueueFull):
                raise answer.body.in_own_words(error) from error
            raise
        return made

    async def _write(self, answer: Answer) -> None:
        """Take the steps of an answer's texts, until they have ended or were stopped."""
        await asyncio.gather(*(self._take(answer, part) for part in answer.parts))
        answer.running = False
        if all(part.reason for part in answer.parts):
            await self._settle(answer, "done")
        elif answer.failure:
            await self._settle(answer, "failed", answer.failure)
        answer.tell()

    async def _take(self, answer: Answer, part: Part) -> None:
        """Take the steps of one text; where it fails, the others of the request are not wanted alone."""
        try:
            async for step in part.ticket:
                part.take(step)
                answer.tell()
            result = part.ticket.result
            if result.finish_reason != "cancelled":
                part.tail, part.reason = result.text[sum(map(len, part.pieces)) :], result.finish_reason
        except Exception as error:
            if answer.stopped:
                return
            if not isinstance(error, InputError | RunError):
                logger.error("%s failed", answer.id, exc_info=error)
            if (fault := fault_of(error, answer.body.bad_words)) is not None:
                answer.status, error = 400, fault
            answer.failure = " ".join(str(error).split()) or type(error).__name__
            self._stop(answer, GONE)

    async def _settle(self, answer: Answer, state: str, error: str = "") -> None:
        """An answer is as whole as it gets. Where the disk says no it stays open there, and the next server
        finds it whole."""
        answer.record.state, answer.record.error = state, error
        answer.over_at = time.time()
        answer.tell()
        try:
            if answer.kept:
                await asyncio.to_thread(self.store.write, answer.record)
        except RunError as failed:
            logger.warning("%s", failed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._gone)
        return task

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, InputError | Refused):
            logger.error("a background task of the server failed", exc_info=error)


def owner_of(key: str) -> str:
    """Whose answers are those of a key, without the key; "" where none is asked for."""
    return hashlib.sha256(f"client\0{key}".encode()).hexdigest() if key else ""
