"""``AsyncLLM``: texts of one model for asynchronous programs, several in each pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from tokenswift.chat.calls import Calls, Reply
from tokenswift.chat.tools import tools_of
from tokenswift.engine.chat import chat_request, reply_of
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Event, Scheduler, Ticket
from tokenswift.loader.prompts import Prompt
from tokenswift.types import Generation, InputError, Step


class AsyncStream(AsyncIterator[Step]):
    """The steps of a text, as they happen; afterwards ``stream.result``. Leaving it early ends the text::

    async with llm.stream("Once upon a time") as stream:
        async for step in stream:
            print(step.text, end="", flush=True)
    print(stream.result.finish_reason)
    """

    def __init__(self, submit: Callable[[], Ticket]) -> None:
        self._submit = submit  # makes the ticket; waits
        self._ticket: Ticket | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._over = False

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Step:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._ticket is None:
                await self._begin()
            event = await self._events.get()
        except BaseException:  # nobody waits for it any more
            self.close()
            raise
        if isinstance(event, Step):
            return event
        self._over = True
        if event is not None:
            raise event
        raise StopAsyncIteration

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        making = loop.run_in_executor(None, self._submit)
        try:
            ticket = await asyncio.shield(making)
        except asyncio.CancelledError:  # a ticket that comes too late is not wanted
            making.add_done_callback(_cancelled)
            raise

        self._ticket = ticket

        def tell(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        ticket.on_event(tell)

    @property
    def result(self) -> Generation:
        """The finished generation; of one that was closed early what there is, once it has ended.

        Raises:
            InputError: it is not over.
        """
        if self._ticket is None:
            raise InputError("stream.result is not available before the end; valid: after the last step")
        return self._ticket.result

    def close(self) -> None:
        """End the text after the step under way."""
        if self._ticket is not None and not self._over:
            self._ticket.cancel()
        self._over = True


def _cancelled(making: asyncio.Future[Ticket]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().cancel()


class AsyncLLM:
    """An ``LLM`` for asynchronous programs: texts that are asked for meanwhile join those under way, and
    share their passes. Each is, token by token, what ``LLM.generate`` returns. A task that is cancelled ends
    its text::

        async with AsyncLLM(LLM("smollm2-135m")) as llm:
            first, second = await asyncio.gather(llm.generate("Once"), llm.generate("There"))

    Args:
        llm: the ``LLM``, which stays the caller's.
        at_once: concurrent texts at most; "auto": as many as the memory holds, and pay.
        queue: texts that may wait for their turn; None: any number.
    Raises:
        InputError: naming the argument and what is valid.
    """

    def __init__(self, llm: LLM, at_once: int | Literal["auto"] = "auto", queue: int | None = None) -> None:
        if not isinstance(llm, LLM):
            raise InputError(f"llm is of type {type(llm).__name__}; valid: an LLM", "llm")
        self.llm = llm
        self._scheduler = Scheduler(llm, at_once, queue)

    async def generate(self, prompt: Prompt, *args: Any, **options: Any) -> Generation:
        """As ``LLM.generate``, with its arguments.

        Raises:
            InputError: naming the argument, its value and what is valid.
            RunError: the run failed on its way.
        """
        return await _finished(self.stream(prompt, *args, **options))

    def stream(self, prompt: Prompt, *args: Any, **options: Any) -> AsyncStream:
        """As ``LLM.stream``; the text begins with the first step that is waited for."""

        def submit() -> Ticket:
            return self._scheduler.submit(Request.of(prompt, self.llm.default_sampling, *args, **options))

        return AsyncStream(submit)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *args: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **options: Any,
    ) -> Reply:
        """As ``LLM.chat``. Raises as `generate`."""

        def request() -> tuple[Request, Calls | None]:
            asked = tools_of(tools, tool_choice, parallel_tool_calls)
            return chat_request(self.llm, messages, asked, *args, **options)

        made, calls = await asyncio.to_thread(request)
        generation = await _finished(AsyncStream(lambda: self._scheduler.submit(made)))
        return reply_of(generation, made, calls)

    async def close(self) -> None:
        """End all texts after the step under way."""
        await asyncio.to_thread(self._scheduler.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def _finished(stream: AsyncStream) -> Generation:
    async with stream:
        async for _ in stream:
            pass
        return stream.result
