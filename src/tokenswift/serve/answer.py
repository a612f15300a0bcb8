"""An answer: one request and its text, fed by a ticket of the scheduler."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenswift.chat import Calls, message_of
from tokenswift.engine.ticket import Ticket
from tokenswift.runs.folder import has_run, load_whole
from tokenswift.runs.regular_files import read_regular, write_whole
from tokenswift.serve.base import Body
from tokenswift.serve.schemas import Responses
from tokenswift.serve.token_texts import TokenTexts, token_texts
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import Generation, InputError, Logprob, RunError, Step

logger = logging.getLogger("tokenswift")
#: files of an answer's folder: its record, and the run of its text
RECORD = "answer.json"
RUN = "0"
#: ids of responses, names of their folders
IDS = re.compile(r"resp_[0-9a-f]{32}")
GRAMMAR = "grammar"  # what ended a text whose grammar could not be followed any further
STRETCH = 0.02  # seconds of steps that one event of a stream tells of


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """What makes an answer again.

    Attributes:
        id: ``resp_…``.
        created: Unix time, in seconds.
        body: the request, as JSON values.
        seed: the sampler's, where the body names none.
        prompt_tokens: how many tokens its prompt has.
        state: "open", "done", "failed" or "cancelled".
        error: why it failed.
        client: digest of the key of the client, who alone may read it; "" where the server has no
            keys.
        before: messages of earlier responses that it goes on from.
        thought: where its thought begins, as `chat.thought_of` has it.
    """

    id: str
    created: float
    body: dict[str, object]
    seed: int
    prompt_tokens: int = 0
    state: str = "open"
    error: str = ""
    client: str = ""
    before: list[dict[str, object]] = []
    thought: str = ""


class Answer:
    """One request and its text.

    Args:
        record: what makes it again, and where it stands.
        body: of the request.
        tokenizer: of the model, by which its text is read.
        root: the folder of all answers; None: nothing is stored.

    Attributes:
        background: it goes on without a reader.
        folder: where it is stored; None: it is not.
        ticket: the scheduler's, once that has the request.
        running: more may come of it on this server.
        status: HTTP's, where it failed: 400 where another try would fail as well.
        pieces: the text that each token released.
        steps: passes that it took.
        tail: text that the end released.
        reason: why it ended, `GRAMMAR` among others, "" before.
        first_step: Unix time of the first step, 0 before it.
        last_step: the same of the newest one.
        is_stopped: its client is gone, or has stopped it.
        prompt: token ids of its prompt, where it is to be echoed.
        tokens: ids of its new tokens, where log-probabilities are asked for.
        logprobs: theirs.
        prompt_logprobs: those of the prompt's tokens, where they are asked for.
    """

    def __init__(
        self, record: Record, body: Body, tokenizer: Tokenizer | None, root: Path | None
    ) -> None:
        self.record = record
        self.body = body
        self.id = record.id
        self.background = bool(body.value_of("background"))
        self.folder: Path | None = None
        if root is not None and isinstance(body, Responses) and body.store is not False:
            self.folder = root / record.id
        self.ticket: Ticket | None = None
        self.running = False
        self.status = 500
        self.pieces: list[str] = []
        self.tail = ""
        self.reason = ""
        self.steps = 0
        self.is_stopped = False
        self.first_step = 0.0
        self.last_step = 0.0
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob | None] = []
        self._tokenizer = tokenizer
        self._news = asyncio.Event()
        self._calls: Calls | None = None

    @property
    def calls(self) -> Calls:
        """The tools that it may call, and how its text is read."""
        return self.read_calls() if self._calls is None else self._calls

    def read_calls(self) -> Calls:
        """`calls` anew; takes a while where there are many tools, so in a thread."""
        tools = self.body.offered_tools()
        self._calls = Calls.of(tools, self._tokenizer, self.record.thought)
        return self._calls

    def recall(self) -> None:
        """Take what its journal holds.

        Raises:
            InputError: it is damaged.
        """
        if self.folder is None or not has_run(self.folder / RUN):
            return
        state = load_whole(self.folder / RUN)
        self._release(state.text, state.chars)
        self.steps += len(state.steps)
        if state.end is not None:
            self.reason = state.end.reason
            self.tail = state.end.tail

    def save(self) -> None:
        """Write the record, all of it or nothing; in a thread.

        Raises:
            RunError: the disk says no.
        """
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(self.folder / RECORD, msgspec.json.encode(self.record))
        except OSError as error:
            raise RunError(
                f"writing in {self.folder} failed ({error.strerror or error})"
            ) from error

    async def forget(self) -> None:
        """Leave nothing of it."""
        if self.folder is not None:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def take(self, step: Step) -> None:
        """One more step."""
        self.last_step = time.time()
        self.first_step = self.first_step or self.last_step
        self.prompt_logprobs += step.prompt_logprobs
        if not self.body.writes_nothing:
            if step.logprobs:
                self.tokens += step.token_ids
                self.logprobs += step.logprobs
            self._release(step.text, step.chars)
        self.steps += 1
        self.tell()

    def end(self, result: Generation) -> None:
        """It has ended by itself."""
        self.reason = "length"
        if not self.body.writes_nothing:
            self.reason = "length" if self.is_late else result.finish_reason
            self.tail = result.text[len(self.text) :]

    def _release(self, text: str, sizes: Sequence[int]) -> None:
        """Take the characters of some tokens."""
        start = 0
        for size in sizes:
            self.pieces.append(text[start : start + size])
            start += size

    @property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens.

        Raises:
            InputError: the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise InputError("the model came without a tokenizer; valid: a model with one")
        return token_texts(self._tokenizer)

    @property
    def is_late(self) -> bool:
        """Whether it has been written for as long as its client waits, and has a line."""
        most = self.body.most_seconds
        is_over = 0 < most < self.last_step - self.first_step
        return is_over and not self.is_stopped and any("\n" in piece for piece in self.pieces)

    @property
    def echo(self) -> str:
        """The text of the prompt, where it is to be echoed; "" else."""
        if not self.prompt:
            return ""
        prompt = self.body.value_of("prompt")
        if isinstance(prompt, str) or self._tokenizer is None:
            return str(prompt)
        return self._tokenizer.decode(self.prompt)

    @property
    def done(self) -> bool:
        """Whether nothing can come of it any more: it is finished, failed or cancelled."""
        return self.record.state != "open"

    @property
    def text(self) -> str:
        """The text so far, with what the end released."""
        return "".join(self.pieces) + self.tail

    @property
    def message(self) -> dict[str, object]:
        """The text as a message of a conversation."""
        return message_of(*self.calls.read(self.text, self.id))

    @property
    def messages(self) -> list[dict[str, object]]:
        """The conversation up to the end of a response, without its instructions."""
        conversation = self.body.conversation() if isinstance(self.body, Responses) else []
        return [*self.record.before, *conversation, self.message]

    def stop(self) -> None:
        """End its steps, or begin none."""
        self.is_stopped = True
        if self.ticket is not None:
            self.ticket.cancel()

    def tell(self) -> None:
        """Wake the readers."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, pause: float) -> AsyncIterator[tuple[int, int] | None]:
        """Stretches of tokens as they come, from one to another; None where nothing came for
        ``pause`` seconds. Ends when nothing more comes. Steps within `STRETCH` go out together: an
        event costs about a tenth of one."""
        start = 0
        while True:
            news = self._news
            is_over = not self.running
            end = len(self.pieces)
            if start < end:
                yield start, end
            if is_over:
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


class News(NamedTuple):
    """What has come of one of several answers.

    Attributes:
        number: of the answer.
        stretch: of its tokens, from one to another; None: nothing came for a while.
        is_over: nothing more comes of it.
    """

    number: int
    stretch: tuple[int, int] | None
    is_over: bool = False


async def follow_all(answers: Sequence[Answer], pause: float) -> AsyncIterator[News]:
    """`Answer.follow` of several answers at once."""
    news: asyncio.Queue[News] = asyncio.Queue()

    async def follow(number: int, answer: Answer) -> None:
        async for stretch in answer.follow(pause):
            news.put_nowait(News(number, stretch))
        news.put_nowait(News(number, None, is_over=True))

    tasks = [asyncio.ensure_future(follow(*numbered)) for numbered in enumerate(answers)]
    under_way = len(tasks)
    try:
        while under_way:
            one = await news.get()
            under_way -= one.is_over
            yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
    """Whose answers are those of a key, without the key; "" where the server has no keys."""
    return hashlib.sha256(f"client\0{key}".encode()).hexdigest() if key else ""


def stored_answer(
    root: Path | None, name: str, tokenizer: Tokenizer | None, to_resume: bool = False
) -> Answer | None:
    """An answer from its folder, as its journal has it; None where there is none that can be
    read, or none that is to be resumed; in a thread."""
    if root is None or not IDS.fullmatch(name):
        return None
    try:
        record = msgspec.json.decode(read_regular(root / name / RECORD), type=Record)
        body = Responses.model_validate(record.body)
        is_open = record.state == "open" and bool(body.background)
        if record.id != name or (to_resume and not is_open):
            return None
        answer = Answer(record, body, tokenizer, root)
        answer.recall()
        answer.read_calls()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's, pydantic's and ours
        reason = " ".join(str(error).split())[:300]
        logger.warning("%s cannot be read (%s); it is left alone", root / name, reason)
        return None
    return answer
