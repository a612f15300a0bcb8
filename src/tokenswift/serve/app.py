"""The routes of the server: what answers at each path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tokenswift.checks import shown
from tokenswift.config.strategies import OPTIONS
from tokenswift.engine.failures import QueueFull
from tokenswift.engine.request import SHARED_STRATEGIES
from tokenswift.loader.find import short_name
from tokenswift.serve.answer import Answer, owner_of
from tokenswift.serve.answers import Answers
from tokenswift.serve.base import Body
from tokenswift.serve.bodies import read_body
from tokenswift.serve.guard import HEALTH
from tokenswift.serve.idle import IdleProgram
from tokenswift.serve.llama_cpp import InfillBody, infill_json, stream_infill
from tokenswift.serve.objects import why_unfinished
from tokenswift.serve.openai import complete_json, stream_chunks
from tokenswift.serve.page import page_of
from tokenswift.serve.refusals import GONE, Refused, log_text, wrong_fields
from tokenswift.serve.responses import response_object, stream_events
from tokenswift.serve.schemas import Chat, Completion, Responses
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
INFILL = "/infill"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
LOOK = 0.1  # seconds until it is looked again whether a client is still there


async def refusal(request: Request, error: Exception) -> Response:
    """Any error in OpenAI's form."""
    match error:
        case Refused():
            refused = error
        case RequestValidationError():
            # of the query: bodies are read by `read_body`
            refused = wrong_fields([{**one, "loc": one["loc"][1:]} for one in error.errors()])
        case QueueFull():
            text = "as many requests wait as may wait; valid: another try in a moment"
            refused = Refused(429, text, **{"retry-after": "1"})
        case InputError():
            refused = Refused(400, str(error), error.field)
        case RecursionError():
            refused = Refused(400, "the body is nested too deeply; valid: few levels")
        case HTTPException(status_code=404 | 405 as status):
            named = f"there is no {request.method[:20]} {shown(request.url.path)}"
            refused = Refused(status, f"{named}; valid: {', '.join(PATHS)}")
        case HTTPException():
            refused = Refused(error.status_code, str(error.detail))
        case _:
            refused = Refused(500, "the server failed; its log says more")
    return JSONResponse(refused.body, refused.status_code, refused.headers)


def page_for(settings: Settings) -> str:
    """The page at ``/``, with the strategies that clients may choose."""
    names = [name for name in OPTIONS if name not in SHARED_STRATEGIES]
    return page_of(names if settings.allow_strategies else ())


def described(kind: type[Body]) -> dict[str, object]:
    """A body, as OpenAPI describes it."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


# ---- the routes ----------------------------------------------------------------------------------


class Routes:
    """What answers at each path.

    Args:
        answers: of the server.
        settings: the limits.
        idle: what runs while nobody waits; None: nothing.

    Attributes:
        model: its name for clients.
    """

    def __init__(
        self, answers: Answers, settings: Settings, idle: IdleProgram | None = None
    ) -> None:
        self.model = settings.served_model_name or short_name(answers.llm.name)
        self._answers = answers
        self._idle = idle
        self._tells_all = settings.is_local
        self._page = page_for(settings)
        self._about = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "tokenswift",
        }

    def add_to(self, app: FastAPI) -> None:
        """Register all of them."""
        add = app.add_api_route
        chats, completions, responses, models = PATHS
        one_response = f"{responses}/{{name}}"
        summary = "Answer a conversation"
        add(chats, self.chat, methods=["POST"], summary=summary, openapi_extra=described(Chat))
        summary = "Go on with a text"
        extra = described(Completion)
        add(completions, self.completion, methods=["POST"], summary=summary, openapi_extra=extra)
        summary = "Fill in the middle of a text, in llama.cpp's form"
        add(
            INFILL,
            self.infill,
            methods=["POST"],
            summary=summary,
            openapi_extra=described(InfillBody),
        )
        summary = "Answer, in the background too"
        extra = described(Responses)
        add(responses, self.responses, methods=["POST"], summary=summary, openapi_extra=extra)
        summary = "An answer as it stands, or its events from a place on"
        add(one_response, self.retrieve, methods=["GET"], summary=summary)
        summary = "Stop an answer for good"
        add(f"{one_response}/cancel", self.cancel, methods=["POST"], summary=summary)
        summary = "Stop an answer and forget it"
        add(one_response, self.delete, methods=["DELETE"], summary=summary)
        add(models, self.models, methods=["GET"], summary="The model that is served")
        add(f"{models}/{{name:path}}", self.one_model, methods=["GET"], summary="About the model")
        add(HEALTH, self.health, methods=["GET"], summary="Whether the server takes requests")
        add("/metrics", self.metrics, methods=["GET"], summary="Figures for Prometheus")
        add("/", self.start, methods=["GET"], include_in_schema=False)
        for path, answer in (("/", self.start), (HEALTH, self.health), (models, self.models)):
            add(path, answer, methods=["HEAD"], include_in_schema=False)

    # ---- new answers -----------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._answer(Chat, request)

    async def completion(self, request: Request) -> Response:
        return await self._answer(Completion, request)

    async def infill(self, request: Request) -> Response:
        return await self._answer(InfillBody, request)

    async def responses(self, request: Request) -> Response:
        return await self._answer(Responses, request)

    async def _answer(self, kind: type[Body], request: Request) -> Response:
        """Answer a request with a body, which has the machine from now on."""
        with self._idle.held() if self._idle else nullcontext():
            return await self._answer_body(kind, request)

    async def _answer_body(self, kind: type[Body], request: Request) -> Response:
        """Answer a request with a body.

        Args:
            kind: of the body.
        Raises:
            InputError, RunError, Refused: it is not answered, or was cut off.
        """
        content_type = request.headers.get("content-type", "")
        try:
            raw = await request.body()
        except ClientDisconnect:
            return Response(status_code=GONE)
        body = await read_body(kind, raw, content_type)
        log_ignored(body, request)
        answers = await self._answers.begin_all(body, request.state.client)
        first = answers[0]
        if body.kind == "infill" and body.stream:
            return _streamed(stream_infill(first, self.model), first, first.stop)
        if body.stream and body.kind != "response":
            return _streamed(stream_chunks(answers, self.model), first, partial(stop_all, answers))
        if body.stream:
            return self._stream(first, at_end=None if first.background else first.stop)
        if not first.background and not await self._end_all(answers, request):
            return Response(status_code=GONE)
        if body.kind == "response":
            return JSONResponse(response_object(first, self.model))
        if body.kind == "infill":
            return Response(infill_json(first, self.model), media_type="application/json")
        # in a thread: there may be hundreds of thousands of log-probabilities
        complete = await asyncio.to_thread(complete_json, answers, self.model)
        return Response(complete, media_type="application/json")

    async def _end_all(self, answers: Sequence[Answer], request: Request) -> bool:
        """Wait until all answers have ended; whether their client has waited, too.

        Raises:
            Refused: one of them has ended without its text; the others are stopped.
        """
        for answer in answers:
            async for _ in answer.follow(LOOK):
                if await request.is_disconnected():
                    stop_all(answers)
                    return False
            if not answer.reason and answer.body.kind != "response":
                stop_all(answers)
                raise Refused(answer.status if answer.done else 503, why_unfinished(answer))
        return True

    def _stream(
        self, answer: Answer, after: int = -1, at_end: Callable[[], None] | None = None
    ) -> Response:
        """A stream of a response.

        Args:
            after: number of the last event that is not told.
            at_end: called where the stream ends, or its client is gone.
        """
        return _streamed(stream_events(answer, self.model, after), answer, at_end)

    # ---- known answers ---------------------------------------------------------------------------

    async def retrieve(
        self,
        name: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, le=2**53)] = -1,
    ) -> Response:
        answer = await self._known(name, request)
        if stream:
            return self._stream(answer, starting_after)
        return JSONResponse(response_object(answer, self.model))

    async def cancel(self, name: str, request: Request) -> Response:
        answer = await self._known(name, request)
        await self._answers.cancel(answer)
        return JSONResponse(response_object(answer, self.model))

    async def delete(self, name: str, request: Request) -> Response:
        await self._answers.delete(await self._known(name, request))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _known(self, name: str, request: Request) -> Answer:
        """A response of the client.

        Raises:
            Refused: the client has none of that id.
        """
        answer = await self._answers.find(name, owner_of(request.state.client))
        if answer is None:
            text = f"there is no response {shown(name)}; valid: the id of one"
            raise Refused(404, text, "response_id")
        return answer

    # ---- about the server ------------------------------------------------------------------------

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._about]})

    async def one_model(self, name: str) -> Response:
        if name != self.model:
            message = f"the model {shown(name)} is not served; valid: {self.model}"
            raise Refused(404, message, "model", "model_not_found")
        return JSONResponse(self._about)

    async def health(self) -> Response:
        state = self._answers.state()
        about: dict[str, object] = {"status": state}
        if self._idle is not None and self._tells_all:  # nobody is asked for a key here
            about["training"] = self._idle.progress
        return JSONResponse(about, 200 if state == "ok" else 503)

    async def metrics(self) -> Response:
        figures = vars(self._answers.scheduler.figures())
        lines = [f"tokenswift_{name} {value}\n" for name, value in figures.items()]
        if self._idle is not None:
            progress = self._idle.progress
            stage = f'{{stage="{progress["stage"]}"}}'
            lines.append(f"tokenswift_training_share{stage} {progress['share']}\n")
            lines.append(f"tokenswift_training_paused {int(progress['paused'])}\n")
        return Response("".join(lines), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def start(self) -> Response:
        return HTMLResponse(self._page, headers={"x-frame-options": "DENY"})


def _streamed(
    events: AsyncIterator[bytes], answer: Answer, at_end: Callable[[], None] | None
) -> Response:
    """The reply that streams events of an answer, or of several of which it is the first."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-answer-id": answer.id}
    return StreamingResponse(
        events,
        headers=headers,
        media_type="text/event-stream",
        background=None if at_end is None else BackgroundTask(at_end),
    )


def stop_all(answers: Sequence[Answer]) -> None:
    """End the steps of answers whose client is gone."""
    for answer in answers:
        answer.stop()


def log_ignored(body: Body, request: Request) -> None:
    """Say which fields of a request nobody knows.

    Raises:
        InputError: without one the answer would mean something else.
    """
    ignored = body.ignored_fields()
    if ignored:
        named = ", ".join(log_text(name, 80) for name in ignored[:20])
        path = log_text(request.scope["path"])
        logger.info("left out of a request to %s: %s", path, named)
