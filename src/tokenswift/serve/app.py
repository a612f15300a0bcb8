"""The routes of the server, and the server: it listens, waits for a signal and ends steps."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from tokenswift.engine.scheduler import QueueFull, Scheduler
from tokenswift.serve import openai as wire
from tokenswift.serve import responses as of_responses
from tokenswift.serve.answers import Answer, Answers, owner_of
from tokenswift.serve.guard import Guard, Refused, error_body, wrong_fields
from tokenswift.serve.schemas import Body, Chat, Completion, Responses
from tokenswift.serve.settings import Settings, bound
from tokenswift.serve.store import Store
from tokenswift.types import InputError, shown
from tokenswift.version import __version__

logger = logging.getLogger("tokenswift")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
LOOK = 0.1  # seconds until it is looked again whether a client is still there
GONE = 499  # the client closed the connection: nobody reads this


class Events(StreamingResponse):
    """A stream of events.

    Args:
        answer: what it tells of.
        events: the stream.
        ends: the answer stops where the stream does, however that ends.
    """

    def __init__(self, answer: Answer, events: AsyncIterator[bytes], ends: bool = False) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-answer-id": answer.id}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._answer, self._ends = answer, ends

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            if self._ends:
                self._answer.stop()


def make_app(answers: Answers, settings: Settings, keys: list[str]) -> FastAPI:
    """The application; it begins by going on with what is open.

    Args:
        answers: of the server.
        settings: the limits.
        keys: of clients; [] asks for none.
    """
    model = settings.served_model_name or Path(answers.llm.name).absolute().name
    about = {"id": model, "object": "model", "created": 0, "owned_by": "tokenswift"}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await answers.open()
        yield

    app = FastAPI(title="tokenswift", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_handlers(app)
    page = (files("tokenswift.serve") / "page.html").read_text(encoding="utf-8")

    def events(answer: Answer, after: int = -1) -> AsyncIterator[bytes]:
        if answer.body.kind == "response":
            return of_responses.events(answer, model, after, settings.ping)
        return wire.chunks(answer, model, settings.ping)

    async def serve(body: Body, request: Request) -> Response:
        if missing := body.left_out():
            named = ", ".join(ascii(name)[1:-1][:80] for name in missing[:20])
            logger.info("left out of a request to %s: %s", request.url.path, named)
        answer = await answers.make(body, request.state.client)
        if body.stream:
            return Events(answer, events(answer), ends=not answer.background)
        if not answer.background:
            async for _ in answer.follow(LOOK):
                if await request.is_disconnected():
                    answer.stop()
                    return Response(status_code=GONE)
        if body.kind == "response":
            return JSONResponse(of_responses.response(answer, model))
        if not answer.reason:
            raise Refused(answer.status if answer.done else 503, wire.unfinished(answer))
        return JSONResponse(wire.whole(answer, model))

    async def known(name: str, request: Request) -> Answer:
        answer = await answers.find(name, owner_of(request.state.client))
        if answer is None:
            raise Refused(404, f"there is no response {shown(name)}; valid: the id of one", "response_id")
        return answer

    @app.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(body: Chat, request: Request) -> Response:
        return await serve(body, request)

    @app.post("/v1/completions", summary="Go on with a text")
    async def completion(body: Completion, request: Request) -> Response:
        return await serve(body, request)

    @app.post("/v1/responses", summary="Answer, in the background too")
    async def responses(body: Responses, request: Request) -> Response:
        return await serve(body, request)

    @app.get("/v1/responses/{response_id}", summary="An answer as it stands, or its events from a place on")
    async def retrieve(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, le=2**53)] = -1,
    ) -> Response:
        answer = await known(response_id, request)
        if not stream:
            return JSONResponse(of_responses.response(answer, model))
        return Events(answer, events(answer, starting_after))

    @app.post("/v1/responses/{response_id}/cancel", summary="Stop an answer for good")
    async def cancel(response_id: str, request: Request) -> Response:
        answer = await known(response_id, request)
        await answers.cancel(answer)
        return JSONResponse(of_responses.response(answer, model))

    @app.delete("/v1/responses/{response_id}", summary="Stop an answer and forget it")
    async def delete(response_id: str, request: Request) -> Response:
        answer = await known(response_id, request)
        await answers.delete(answer)
        return JSONResponse({"id": answer.id, "object": "response", "deleted": True})

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

    app.add_middleware(Guard, settings=settings, keys=keys)  # type: ignore[arg-type]
    if settings.cors:  # in front of the guard: browsers ask first, without a key, and want to read refusals
        app.add_middleware(
            CORSMiddleware,  # type: ignore[arg-type]
            allow_origins=list(settings.cors),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-answer-id", "retry-after"),
        )
    return app


def _add_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's form."""

    @app.exception_handler(InputError)
    async def wrong(request: Request, error: InputError) -> Response:
        if isinstance(error, QueueFull):
            text = "as many requests wait as may wait; valid: another try in a moment"
            return JSONResponse(error_body(text, 429), 429, {"retry-after": "1"})
        return JSONResponse(error_body(str(error), 400, error.field), 400)

    @app.exception_handler(RequestValidationError)
    async def unread(request: Request, error: RequestValidationError) -> Response:
        return await wrong(request, wrong_fields(error.errors()))

    @app.exception_handler(RecursionError)
    async def deep(request: Request, error: RecursionError) -> Response:
        return await wrong(request, InputError("the body is nested too deeply; valid: few levels"))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if error.status_code in (404, 405) and not isinstance(error, Refused):
            text = f"there is no {request.method[:20]} {shown(request.url.path)}; valid: {', '.join(PATHS)}"
        body = error.body if isinstance(error, Refused) else error_body(text, error.status_code)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body("the server failed; its log says more", 500), 500)


# ---- where it runs ------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn's, which ends answers before it waits for their connections.

    Args:
        config: of uvicorn.
        answers: what is ended.
        taken: the socket to listen at.

    Attributes:
        address: of the server.
        number: of the signal that ended it, 0 where none did.
    """

    def __init__(self, config: uvicorn.Config, answers: Answers, taken: socket.socket) -> None:
        super().__init__(config)
        self.answers, self._taken = answers, taken
        host, port = taken.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.number = 0

    def listen(self, ready: Callable[[str], None]) -> None:
        """Serve until a signal comes, or `should_exit` is set.

        Args:
            ready: called with the address once requests are taken.
        """
        self._ready = ready
        asyncio.run(self.serve(sockets=[self._taken]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        await super().startup(sockets)
        if self.started:
            self._ready(self.address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server between two steps, a second one at once."""
        if self.number:
            os._exit(128 + sig)
        self.number, self.should_exit = sig, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the steps, then the connections."""
        await self.answers.close()
        await super().shutdown(sockets)


def make_server(
    llm: Any, settings: Settings, taken: socket.socket | None = None, store: Store | None = None
) -> Server:
    """A server at its address that takes no request yet.

    Args:
        llm: the ``LLM``.
        taken, store: from `bound` and of ``run_dir``, where they were had before the model was loaded.
    Raises:
        InputError: an address, a folder or keys that cannot be had.
    """
    keys = settings.keys()
    store = store or Store(settings.run_dir)
    taken = taken or bound(settings)
    scheduler = Scheduler(llm, settings.max_concurrent or "auto", settings.queue)
    answers = Answers(llm, scheduler, settings, store)
    config = uvicorn.Config(
        make_app(answers, settings, keys),
        http="h11",
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=3,  # seconds for connections to take what is left
    )
    return Server(config, answers, taken)
