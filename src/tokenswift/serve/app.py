"""The routes of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from tokenswift.checks import shown
from tokenswift.engine.scheduler import QueueFull
from tokenswift.serve import openai as wire
from tokenswift.serve import responses as of_responses
from tokenswift.serve.answers import ENDS, Answer, Answers, owner_of
from tokenswift.serve.errors import Refused, error_body, wrong_fields
from tokenswift.serve.guard import Guard, Measures
from tokenswift.serve.schemas import Body, Chat, Completion, Responses
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError
from tokenswift.version import __version__

logger = logging.getLogger("tokenswift")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
READ = ["GET", "HEAD"]
LOOK = 0.1  # seconds until it is looked again whether a client is still there
GONE = 499  # the client closed the connection: nobody reads this


class Events(StreamingResponse):
    """A stream of events; its answer has a reader until it ends, however it ends."""

    def __init__(self, answers: Answers, answer: Answer, events: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-answer-id": answer.id}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._answers, self._answer = answers, answer

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._answers.detach(self._answer)


def make_app(answers: Answers, settings: Settings, keys: list[str], measures: Measures) -> FastAPI:
    """The application; it begins by going on with what is open.

    Args:
        answers: of the server.
        settings: the limits.
        keys: of clients; [] asks for none.
        measures: figures for ``/metrics``.
    """
    names = settings.names(answers.llm.name)
    model, made = names[0], int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await answers.open()
        yield

    app = FastAPI(title="tokenswift", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_handlers(app)
    page = (files("tokenswift.serve") / "page.html").read_text(encoding="utf-8")

    def about(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": made, "owned_by": "tokenswift"}

    async def answered(kind: str, body: Body, request: Request) -> Response:
        answer = await answers.make(kind, body, request.state.client)
        if body.stream:
            if kind == "response":
                return Events(answers, answer, of_responses.events(answer, model, -1, settings.ping))
            return Events(answers, answer, wire.chunks(answer, model, settings.ping))
        try:
            if not answer.background and await _is_gone(request, answer):
                return Response(status_code=GONE)
        finally:
            answers.detach(answer)
        if kind == "response":
            return JSONResponse(of_responses.response(answer, model))
        if not all(part.reason for part in answer.parts):
            raise Refused(503 if answer.stopped == ENDS else answer.status, wire.unfinished(answer))
        return JSONResponse(wire.whole(answer, model))

    async def serve(kind: str, body: Body, request: Request) -> Response:
        made = await answered(kind, body, request)
        other = body.model not in (None, *names, answers.llm.name)
        if missing := [*(["model"] if other else []), *body.left_out()]:
            named = ", ".join(ascii(name)[1:-1][:80] for name in missing[:20]).strip()
            logger.info("left out of a request to %s: %s", request.url.path, named)
            made.headers["x-left-out"] = named
        return made

    async def known(name: str, request: Request) -> Answer:
        answer = await answers.find(name, owner_of(request.state.client))
        if answer is None:
            raise Refused(404, f"there is no response {shown(name)}; valid: the id of one", "response_id")
        return answer

    @app.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(body: Chat, request: Request) -> Response:
        return await serve("chat", body, request)

    @app.post("/v1/completions", summary="Go on with a text")
    async def completion(body: Completion, request: Request) -> Response:
        return await serve("completion", body, request)

    @app.post("/v1/responses", summary="Answer, in the background too")
    async def responses(body: Responses, request: Request) -> Response:
        return await serve("response", body, request)

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
        await answers.attach(answer)
        return Events(answers, answer, of_responses.events(answer, model, starting_after, settings.ping))

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

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models", summary="The model that is served")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [about(name) for name in names]})

    @app.get("/v1/models/{name:path}", summary="About the model")
    async def one_model(name: str) -> Response:
        if name not in names:
            message = f"the model {shown(name)} is not served; valid: {', '.join(names)}"
            raise Refused(404, message, "model", "model_not_found")
        return JSONResponse(about(name))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="Whether the server takes requests")
    async def health() -> Response:
        state = answers.state()
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        return Response(measures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/", methods=READ, include_in_schema=False)
    async def start() -> Response:
        return HTMLResponse(page, headers={"x-frame-options": "DENY"})

    app.add_middleware(Guard, settings=settings, keys=keys, measures=measures)  # type: ignore[arg-type]
    if settings.cors:  # in front of the guard: browsers ask first, without a key, and want to read refusals
        app.add_middleware(
            CORSMiddleware,  # type: ignore[arg-type]
            allow_origins=list(settings.cors),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-answer-id", "x-left-out", "retry-after"),
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

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(HTTPException)
    async def nothing_there(request: Request, error: HTTPException) -> Response:
        path, text = request.url.path, str(error.detail)
        if error.status_code == 400:  # FastAPI's: numbers of thousands of digits, thousands of levels
            text = "the body cannot be read; valid: a JSON object of few levels"
        elif error.status_code in (404, 405):
            text = f"there is no {request.method[:20]} {shown(path)}; valid: {', '.join(PATHS)}"
        return JSONResponse(error_body(text, error.status_code), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body("the server failed; its log says more", 500), 500)


async def _is_gone(request: Request, answer: Answer) -> bool:
    """Wait for the answer's end, or for its client's going away; which it was."""
    whole = asyncio.ensure_future(answer.wait())
    try:
        while not (await asyncio.wait([whole], timeout=LOOK))[0]:
            if await request.is_disconnected():
                return True
        return False
    finally:
        whole.cancel()
