"""The application behind its guard, and the server itself: it listens, waits for a signal and ends
steps."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from tokenswift.engine.llm import LLM
from tokenswift.engine.scheduler import Scheduler
from tokenswift.serve.answers import Answers
from tokenswift.serve.app import Routes, refusal
from tokenswift.serve.connections import protocol_of
from tokenswift.serve.guard import Guard
from tokenswift.serve.idle import IdleProgram
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError
from tokenswift.version import __version__

logger = logging.getLogger("tokenswift")


def make_app(answers: Answers, settings: Settings, idle: IdleProgram | None = None) -> FastAPI:
    """The application; it begins by going on with what is open.

    Args:
        answers: of the server.
        settings: the limits.
        idle: what runs while nobody waits; None: nothing.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await answers.open()
        watching = None
        if idle is not None:
            watching = asyncio.create_task(idle.watch(lambda: answers.is_busy))
        yield
        if watching is not None:
            watching.cancel()

    app = FastAPI(
        title="tokenswift", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for kind in (InputError, RequestValidationError, RecursionError, HTTPException, Exception):
        app.add_exception_handler(kind, refusal)
    Routes(answers, settings, idle).add_to(app)
    app.add_middleware(Guard, settings=settings)  # type: ignore[arg-type]
    if settings.cors:
        # in front of the guard: browsers ask first, without a key, and want to read refusals
        app.add_middleware(
            CORSMiddleware,  # type: ignore[arg-type]
            allow_origins=list(settings.cors),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-answer-id", "retry-after"),
        )
    return app


class Server(uvicorn.Server):
    """uvicorn's, which ends answers before it waits for their connections.

    Args:
        llm: the model that is served.
        settings: the limits.
        listener: of `settings.held`, which is left after the server has ended.
        idle: what runs while nobody waits, and ends with the server; None: nothing.

    Attributes:
        address: of the server.
        number: the signal's that ended it, 0 where none did.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Settings,
        listener: socket.socket,
        idle: IdleProgram | None = None,
    ) -> None:
        scheduler = Scheduler(llm, settings.max_concurrent or "auto", settings.queue)
        self.answers = Answers(llm, scheduler, settings)
        self.number = 0
        self._listener = listener
        self._idle = idle
        config = uvicorn.Config(
            make_app(self.answers, settings, idle),
            http=protocol_of(settings),
            ws="none",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,  # seconds for connections to take what is left
        )
        super().__init__(config)
        host, port = listener.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        await super().startup([self._listener])
        if self.started:
            logger.info("listening on %s", self.address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server between two steps, a second one at once."""
        if self.number:
            os._exit(128 + sig)
        self.number = sig
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the steps, then the connections."""
        if self._idle is not None:
            self._idle.close()
        await self.answers.close()
        await super().shutdown(sockets)
