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
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import msgspec

from tokenswift.chat.calls import Calls, Said, ToolCall, call_id, calls_of
from tokenswift.chat.families import thought_of
from tokenswift.engine.detokenize import TextStream, token_bytes
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import QueueFull
from tokenswift.loader.prompts import Prompt
from tokenswift.runs.state import RunState, sources_of
from tokenswift.serve.errors import Refused, fault_of
from tokenswift.serve.guard import Measures
from tokenswift.serve.schemas import KINDS, Body
from tokenswift.serve.settings import Settings
from tokenswift.serve.store import IDS, Record, Store, brief
from tokenswift.types import InputError, Logprob, RunError, Step
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
KEPT = 64  # answers in memory besides those under way and those that somebody reads
BOUND = 2  # requests with a grammar that are looked at at once: one may take a core for seconds, and 4 GB
AGAIN = 0.5  # seconds until a full queue is tried again
#: why an answer was stopped
GONE, CANCELLED, ENDS = "its client is gone", "it was cancelled", "the server is shutting down"
LATE = "the answer took longer than the server's --max-seconds"
STALLED = 60.0  # seconds without a step, while there is work, after which the server is not well
LEAST = -9999.0  # in place of minus infinity, for which JSON has no number; vLLM's

#: a token's bytes, its place in the text, log-probability (None: nothing stands before it), and bytes and
#: log-probabilities of the likeliest tokens there
Told = tuple[bytes, int, float | None, list[tuple[bytes, float]]]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt.

    Attributes:
        tokens: ids.
        text: as it was given, or of the ids.
        places: where in the text each token begins.
    """

    tokens: tuple[int, ...]
    text: str
    places: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> Echo:
        """The echo of a prompt that has these ids. Special tokens that its text begins with without having
        them are at place 0."""
        stream = TextStream(tokenizer)
        places, whole = [], ""
        for token in tokens:
            places.append(len(whole))
            whole += stream.push(token)
        whole += stream.finish()
        text = prompt if isinstance(prompt, str) else whole
        more = len(whole) - len(text) if whole.endswith(text) else 0
        return cls(tuple(tokens), text, tuple(min(max(0, at - more), len(text)) for at in places))


def echoes(body: Body, requests: Sequence[Request], tokenizer: Any) -> list[Echo | None]:
    """Of each text's prompt; None where a body does not ask to be told of it."""
    if body.prompt_likely is None and not body.echoes:
        return [None] * len(requests)
    each, prompts = body.choices, body.prompts(True, ())
    made = [Echo.of(p, requests[i * each].prompt, tokenizer) for i, p in enumerate(prompts)]  # type: ignore[arg-type]
    return [made[i // each] for i in range(len(requests))]


def token_told(
    token: int, place: int, found: Logprob | None, spell: Callable[[int], bytes], top: int | None = None
) -> Told:
    """What a text tells of one of its tokens."""
    if found is None:
        return spell(token), place, None, []
    others = [(spell(other), value) for other, value in found.top[:top]]
    return spell(token), place, max(found.logprob, LEAST), others


def ranked(
    tokens: Sequence[int], found: Sequence[Logprob | None], spell: Callable[[int], bytes], top: int
) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities in vLLM's form: of each token by its id, and of the likeliest ones."""

    def one(token: int, value: float, rank: int) -> dict[str, Any]:
        said = spell(token).decode(errors="replace")
        return {"logprob": max(value, LEAST), "rank": rank, "decoded_token": said}

    made: list[dict[str, Any] | None] = []
    for token, each in zip(tokens, found, strict=True):
        if each is None:
            made.append(None)
            continue
        best = {str(t): one(t, value, i) for i, (t, value) in enumerate(each.top[:top], 1)}
        made.append({str(token): one(token, each.logprob, each.rank)} | best)
    return made


STRETCH = 0.02  # seconds of steps that one event of a stream tells of


class Part:
    """One text of an answer.

    Attributes:
        pieces: the text that each token released.
        letters: who drafted each token (`spec.drafters.registry`).
        steps: tokens and milliseconds of each step.
        echo: its prompt, where the answer is to tell of it.
        logprobs: of each token, where they are asked for.
        prompt_logprobs: of each token of the prompt, from the first step on.
        tail: text that the end released.
        reason: why it ended, "" before.
        over: no token comes any more, for now: it ended, failed or was stopped.
    """

    def __init__(self, index: int, prompt_tokens: int, echo: Echo | None = None) -> None:
        self.index, self.prompt_tokens, self.echo = index, prompt_tokens, echo
        self.ticket: Any = None
        self.rewind(None)

    def rewind(self, state: RunState | None) -> None:
        """Go back to what a journal holds, or to the beginning."""
        self.pieces: list[str] = []
        self.letters: list[str] = []
        self.steps: list[tuple[int, float]] = []
        self.logprobs: list[Told] = []
        self.prompt_logprobs: tuple[Logprob | None, ...] = ()
        self.tail = self.reason = ""
        self.over = False
        self._released = 0 if state is None else sum(state.chars)
        if state is None:
            return
        at = 0
        for size in state.chars:
            self.pieces.append(state.text[at : at + size])
            at += size
        self.letters = list(state.sources)
        for session in state.steps:
            before = 0
            for step in session:
                self.steps.append((step[0], step[5] - before))
                before = step[5]
        if state.end is not None:
            self.reason, self.tail, self.over = state.end.reason, state.end.tail, True

    def take(self, step: Step, spell: Callable[[int], bytes]) -> None:
        """One more step; ``spell`` gives the bytes of tokens."""
        self.prompt_logprobs = self.prompt_logprobs or step.prompt_logprobs
        for token, place, found in zip(step.token_ids, step.begins, step.logprobs, strict=False):
            self.logprobs.append(token_told(token, place, found, spell))
        at = 0
        for size in step.chars:
            self.pieces.append(step.text[at : at + size])
            at += size
        self.tail = step.text[at:]
        self._released += at
        self.letters += sources_of(step)
        self.steps.append((len(step.token_ids), round(1000 * step.seconds, 3)))

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


def _unknown(token: int) -> bytes:
    raise ValueError(f"token {token} of an answer that was read again, which tells of none")


class Answer:
    """One request and its texts.

    Attributes:
        readers: requests that wait for it now.
        begun, running: its tickets were, or are, with the scheduler (also an earlier server's).
        kept: it has a folder: what is stopped by the server's end goes on with the next one.
        stopped: why it was stopped, "" where it goes on or has ended.
        failure: what went wrong, "" where nothing did.
        status: of HTTP, of that: 400 where another try would fail as well.
        over_at: when it became whole, Unix time.
        calls: the tools that it may call; None: none.
        spell: gives the bytes of tokens.
    """

    def __init__(self, record: Record, body: Body) -> None:
        self.record, self.body = record, body
        self.parts = [Part(i, tokens) for i, tokens in enumerate(record.prompt_tokens)]
        self.readers = 0
        self.requests: list[Request] | None = None  # of a new one, until they are handed on
        self.begun = self.running = False
        self.failure, self.status = "", 500
        self.over_at: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.stopped, self.kept = "", False
        self.calls: Calls | None = None
        self.spell: Callable[[int], bytes] = _unknown
        self.lock = asyncio.Lock()
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def background(self) -> bool:
        """Whether it goes on without a reader."""
        return bool(getattr(self.body, "background", None))

    @property
    def over(self) -> bool:
        """Whether nothing more comes, for now."""
        return all(part.over for part in self.parts)

    @property
    def done(self) -> bool:
        """Whether it is as whole as it gets: finished, failed or cancelled."""
        return self.record.state != "open"

    def said(self, part: Part) -> Said:
        """What a text holds."""
        return Said(part.text) if self.calls is None else self.calls.read(part.text)

    def call_id(self, part: Part, index: int) -> str:
        """The id of a call in a text."""
        return call_id(f"{self.id}/{part.index}", index)

    def tool_calls(self, part: Part, said: Said) -> list[dict[str, Any]]:
        """The calls in a text, as messages hold them."""
        made = (ToolCall(self.call_id(part, i), *call) for i, call in enumerate(said.calls))
        return [call.form for call in made]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Of a response: the conversation up to its end, without its instructions."""
        body: Any = self.body
        found: list[dict[str, Any]] = [*self.record.before, *body.messages()]
        for part in self.parts:
            said = self.said(part)
            calls = self.tool_calls(part, said)
            found.append(
                {"role": "assistant", "content": said.text}
                | ({"tool_calls": calls} if calls else {})
                | ({"reasoning_content": said.thought} if said.thought else {})
            )
        return found

    def tell(self) -> None:
        """Wake the readers."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int, pause: float) -> AsyncIterator[tuple[Part, int, int] | None]:
        """Stretches of tokens as they come, from a position on in every text; None where nothing came for
        ``pause`` seconds. Ends when nothing more comes.

        Steps that follow each other within `STRETCH` go out together: an event costs about a tenth of a step.
        """
        places = [start] * len(self.parts)
        loop = asyncio.get_running_loop()
        newest = loop.time() - STRETCH  # the first one goes out at once
        while True:
            if 0 < (rest := newest + STRETCH - loop.time()) and not self.over:
                await asyncio.sleep(rest)
            news, over = self._news, self.over
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
            timer = loop.call_at(
                newest + pause, self.tell
            )  # lighter, for each step, than a wait with a limit
            await news.wait()
            timer.cancel()

    async def wait(self) -> None:
        """Until nothing more comes."""
        while not self.over:
            await self._news.wait()


class Shelf:
    """All answers of a server.

    Args:
        store: where answers are kept; None: in memory alone.
        tokenizer: of the model.

    Attributes:
        answers: those in memory, by id, the one asked for last at the end.
    """

    def __init__(self, store: Store | None, tokenizer: Any) -> None:
        self._store, self._tokenizer = store, tokenizer
        self._spell = cache(partial(token_bytes, tokenizer))  # as large as the vocabulary at most
        self.answers: OrderedDict[str, Answer] = OrderedDict()

    @property
    def disk(self) -> Store:
        """Where answers are kept; for those that are."""
        assert self._store is not None
        return self._store

    async def left(self) -> list[Answer]:
        """Answers of the background that an earlier server left."""
        found: list[Answer] = []
        if self._store is None:
            return found
        for record in await asyncio.to_thread(lambda store: list(store.records()), self._store):
            if record.state == "open" and record.body.get("background"):
                answer = await self._read(record)
                found += [] if answer is None else [answer]
        return found

    def add(self, answer: Answer) -> None:
        """A new answer; it has a folder unless it tells what no journal holds."""
        body = answer.body
        plain = body.likely is None and body.prompt_likely is None and not body.echoes
        answer.kept = self._store is not None and plain and getattr(body, "store", None) is not False
        answer.spell = self._spell
        self.answers[answer.id] = answer

    def know(self, answer: Answer) -> None:
        """See how an answer is read."""
        answer.calls = calls_of(answer.body.tools_asked(), self._tokenizer, answer.record.thought)

    async def get(self, name: str) -> Answer | None:
        """An answer by its id; None where there is none."""
        if name in self.answers:
            self.answers.move_to_end(name)
            return self.answers[name]
        if self._store is None or not IDS.fullmatch(name):
            return None
        record = await asyncio.to_thread(self._store.read, name)
        if name in self.answers:  # somebody else was faster
            return self.answers[name]
        return None if record is None else await self._read(record)

    async def _read(self, record: Record) -> Answer | None:
        """An answer of the store, as its journals have it; it is not begun."""
        try:
            answer = Answer(record, KINDS[record.kind][0].model_validate(record.body))
            self.know(answer)
            answer.kept = True
            for part in answer.parts:
                part.rewind(await asyncio.to_thread(self.disk.state, record.id, part.index))
                part.over = True
            answer.begun = True
        except (KeyError, ValueError) as error:  # pydantic's and ours
            why = " ".join(str(error).split())[:300]
            logger.warning("%s cannot be resumed: %s", brief(record.id), why)
            return None
        answer = self.answers.setdefault(record.id, answer)
        self.shed()
        return answer

    async def write(self, answer: Answer) -> None:
        """Keep a new answer's record, where it is kept.

        Raises:
            RunError: the disk says no.
        """
        if answer.kept:
            await asyncio.to_thread(self.disk.write, answer.record)

    async def settle(self, answer: Answer) -> None:
        """Keep how an answer ended; where the disk says no it stays open there, and the next server finds it
        whole."""
        try:
            await self.write(answer)
        except RunError as failed:
            logger.warning("%s", failed)

    async def remove(self, answer: Answer) -> None:
        """Let go of an answer and of its folder."""
        self.answers.pop(answer.id, None)
        if answer.kept:
            await asyncio.to_thread(self.disk.remove, answer.id)

    def shed(self) -> None:
        """Let go of the oldest answers that nobody reads."""
        idle = [a for a in self.answers.values() if not a.readers and not a.running and not a.lock.locked()]
        for answer in idle[: max(0, len(self.answers) - KEPT)]:
            self.answers.pop(answer.id)


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
            logger.info("resuming %s from %s", counted(len(left), "answer"), self.shelf.disk.folder)
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
            raise InputError(f"the body cannot be stored ({error}); valid: whole characters") from error
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
                    ids: Any = requests[0].prompt
                    record.thought = thought_of(self.llm.source.codec, ids)
                self.shelf.know(answer)
                found = await asyncio.to_thread(echoes, body, requests, self.llm.source.codec)
                answer.parts = [Part(i, record.prompt_tokens[i], echo) for i, echo in enumerate(found)]
                answer.requests = requests
                await self.shelf.write(answer)
        except BaseException:
            self.shelf.answers.pop(answer.id, None)
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
            raise Refused(503, "the server can no longer generate (see its log); valid: a restarted server")
        raise Refused(503, "the server is shutting down; valid: try again once it is back")

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
            logger.error("a background task of the server failed", exc_info=error)


def _pass_on(loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], event: Any) -> None:
    """From the scheduler's thread to the event loop's."""
    with suppress(RuntimeError):  # the loop is closed: nobody reads any more
        loop.call_soon_threadsafe(take, event)


def owner_of(key: str) -> str:
    """Whose answers are those of a key, without the key; "" where none is asked for."""
    return hashlib.sha256(f"client\0{key}".encode()).hexdigest() if key else ""
