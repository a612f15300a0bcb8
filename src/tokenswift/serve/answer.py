"""An answer of the server and its texts, as its readers see them. All on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from tokenswift.chat.calls import Calls
from tokenswift.chat.reply import Said, ToolCall, call_id
from tokenswift.engine.request import Request
from tokenswift.runs.state import RunState, sources_of
from tokenswift.serve.echo import Echo, Told, token_told
from tokenswift.serve.schemas import Body
from tokenswift.serve.store import Record
from tokenswift.types import Logprob, Step

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
        place = self.logprobs[-1][1] + len(self.pieces[-1]) if self.logprobs else 0
        for token, size, found in zip(step.token_ids, step.chars, step.logprobs, strict=False):
            self.logprobs.append(token_told(token, place, found, spell))
            place += size
        at = 0
        for size in step.chars:
            self.pieces.append(step.text[at : at + size])
            at += size
        self.tail = step.text[at:]
        self.letters += sources_of(step)
        self.steps.append((len(step.token_ids), round(1000 * step.seconds, 3)))

    @property
    def text(self) -> str:
        """The text so far, with what the end released."""
        return "".join(self.pieces) + (self.tail if self.reason else "")


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
