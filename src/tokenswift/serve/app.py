"""The routes of the server, the guard in front of them, and the server itself: it listens, waits
for a signal and ends steps."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from tokenswift.checks import shown
from tokenswift.config.strategies import OPTIONS
from tokenswift.engine.failures import QueueFull
from tokenswift.engine.request import SHARED_STRATEGIES
from tokenswift.engine.scheduler import Scheduler
from tokenswift.loader.find import short_name
from tokenswift.serve import openai as wire
from tokenswift.serve.answer import Answer
from tokenswift.serve.answers import Answers, owner_of
from tokenswift.serve.base import Body
from tokenswift.serve.bodies import read_body
from tokenswift.serve.connections import protocol_of
from tokenswift.serve.guard import Guard
from tokenswift.serve.refusals import Refused, log_text, wrong_fields
from tokenswift.serve.schemas import Chat, Completion, Responses
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError
from tokenswift.version import __version__

logger = logging.getLogger("tokenswift")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
LOOK = 0.1  # seconds until it is looked again whether a client is still there
GONE = 499  # the client closed the connection: nobody reads this


async def refusal(request: Request, error: Exception) -> Response:
    """Any error in OpenAI's form."""
    match error:
        case Refused():
            refused = error
        case RequestValidationError():
            places = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
            refused = wrong_fields(places)  # of the query: bodies are read by `read_body`
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


def page_of(settings: Settings) -> str:
    """The page at ``/``, with the strategies that clients may choose."""
    page = (files("tokenswift.serve") / "page.html").read_text(encoding="utf-8")
    names = [name for name in OPTIONS if name not in SHARED_STRATEGIES]
    options = "".join(f"<option>{name}" for name in names) if settings.allow_strategies else ""
    return page.replace("<!-- other strategies -->", options)


def described(kind: type[Body]) -> dict[str, object]:
    """A body, as OpenAPI describes it."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


# ---- the routes ----------------------------------------------------------------------------------


def make_app(answers: Answers, settings: Settings) -> FastAPI:
    """The application; it begins by going on with what is open.

    Args:
        answers: of the server.
        settings: the limits.
    """
    model = settings.served_model_name or short_name(answers.llm.name)
    about = {"id": model, "object": "model", "created": 0, "owned_by": "tokenswift"}
    page = page_of(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await answers.open()
        yield

    app = FastAPI(
        title="tokenswift", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for kind in (InputError, RequestValidationError, RecursionError, HTTPException, Exception):
        app.add_exception_handler(kind, refusal)

    def events(answer: Answer, after: int = -1, then: Callable[[], None] | None = None) -> Response:
        """A stream; ``then`` is called where it ends, or its client is gone."""
        is_response = answer.body.kind == "response"
        made = wire.events(answer, model, after) if is_response else wire.chunks(answer, model)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-answer-id": answer.id}
        ended = None if then is None else BackgroundTask(then)
        return StreamingResponse(made, 200, headers, "text/event-stream", ended)

    async def serve(kind: type[Body], request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        try:
            raw = await request.body()
        except ClientDisconnect:
            return Response(status_code=GONE)
        body = await read_body(kind, raw, content_type)
        if missing := body.left_out():
            named = ", ".join(log_text(name, 80) for name in missing[:20])
            path = log_text(request.scope["path"])
            logger.info("left out of a request to %s: %s", path, named)
        answer = await answers.make(body, request.state.client)
        if body.stream:
            return events(answer, then=None if answer.background else answer.stop)
        if not answer.background:
            async for _ in answer.follow(LOOK):
                if await request.is_disconnected():
                    answer.stop()
                    return Response(status_code=GONE)
        if body.kind == "response":
            return JSONResponse(wire.response(answer, model))
        if not answer.reason:
            raise Refused(answer.status if answer.done else 503, wire.unfinished(answer))
        return JSONResponse(wire.whole(answer, model))

    async def known(name: str, request: Request) -> Answer:
        answer = await answers.find(name, owner_of(request.state.client))
        if answer is None:
            raise Refused(
                404, f"there is no response {shown(name)}; valid: the id of one", "response_id"
            )
        return answer

    @app.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        openapi_extra=described(Chat),
    )
    async def chat(request: Request) -> Response:
        return await serve(Chat, request)

    @app.post("/v1/completions", summary="Go on with a text", openapi_extra=described(Completion))
    async def completion(request: Request) -> Response:
        return await serve(Completion, request)

    @app.post(
        "/v1/responses",
        summary="Answer, in the background too",
        openapi_extra=described(Responses),
    )
    async def responses(request: Request) -> Response:
        return await serve(Responses, request)

    @app.get(
        "/v1/responses/{name}", summary="An answer as it stands, or its events from a place on"
    )
    async def retrieve(
        name: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, le=2**53)] = -1,
    ) -> Response:
        answer = await known(name, request)
        return (
            events(answer, starting_after) if stream else JSONResponse(wire.response(answer, model))
        )

    @app.post("/v1/responses/{name}/cancel", summary="Stop an answer for good")
    async def cancel(name: str, request: Request) -> Response:
        answer = await known(name, request)
        await answers.cancel(answer)
        return JSONResponse(wire.response(answer, model))

    @app.delete("/v1/responses/{name}", summary="Stop an answer and forget it")
    async def delete(name: str, request: Request) -> Response:
        await answers.delete(await known(name, request))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [about]})

    @app.get("/v1/models/{name:path}", summary="About the model")
    async def one_model(name: str) -> Response:
        if name != model:
            message = f"the model {shown(name)} is not served; valid: {model}"
            raise Refused(404, message, "model", "model_not_found")
        return JSONResponse(about)

    @app.get("/health", summary="Whether the server takes requests")
    async def health() -> Response:
        state = answers.state()
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        figures = vars(answers.scheduler.figures())
        lines = (f"tokenswift_{name} {value}\n" for name, value in figures.items())
        return Response("".join(lines), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        return HTMLResponse(page, headers={"x-frame-options": "DENY"})

    app.add_middleware(Guard, settings=settings)  # type: ignore[arg-type]
    if (
        settings.cors
    ):  # in front of the guard: browsers ask first, without a key, and want to read refusals
        app.add_middleware(
            CORSMiddleware,  # type: ignore[arg-type]
            allow_origins=list(settings.cors),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-answer-id", "retry-after"),
        )
    return app


# ---- where it runs -------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn's, which ends answers before it waits for their connections.

    Args:
        llm: the ``LLM``.
        settings: the limits.
        taken: of `settings.held`, which is left after the server has ended.

    Attributes:
        address: of the server.
        number: of the signal that ended it, 0 where none did.
    """

    def __init__(self, llm: Any, settings: Settings, taken: socket.socket) -> None:
        scheduler = Scheduler(llm, settings.max_concurrent or "auto", settings.queue)
        self.answers, self._taken, self.number = Answers(llm, scheduler, settings), taken, 0
        config = uvicorn.Config(
            make_app(self.answers, settings),
            http=protocol_of(settings),
            ws="none",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,  # seconds for connections to take what is left
        )
        super().__init__(config)
        host, port = taken.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        await super().startup([self._taken])
        if self.started:
            logger.info("listening on %s", self.address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server between two steps, a second one at once."""
        if self.number:
            os._exit(128 + sig)
        self.number, self.should_exit = sig, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the steps, then the connections."""
        await self.answers.close()
        await super().shutdown(sockets)
