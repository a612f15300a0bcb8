"""Runs the application: listens, waits for a signal, ends steps and says how to go on."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from tokenswift.engine.scheduler import Scheduler
from tokenswift.serve.answers import Answers
from tokenswift.serve.app import make_app
from tokenswift.serve.guard import Measures
from tokenswift.serve.settings import Settings, bound
from tokenswift.serve.store import Store

PATIENCE = 8.0  # seconds until a signal ends the process, whatever it does

logger = logging.getLogger("tokenswift")


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
        self._watch = threading.Timer(PATIENCE, self._give_up)
        self._watch.daemon = True

    def listen(self, ready: Callable[[str], None]) -> None:
        """Serve until a signal comes, or `should_exit` is set.

        Args:
            ready: called with the address once requests are taken.
        """
        self._ready = ready
        try:
            asyncio.run(self.serve(sockets=[self._taken]))
        finally:
            self._watch.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        await super().startup(sockets)
        if self.started:
            self._ready(self.address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server between two steps, after `PATIENCE` or a second one at once."""
        if self.number:
            os._exit(128 + sig)
        self.number, self.should_exit = sig, True
        self._watch.start()

    def _give_up(self) -> None:
        """End the process where a step, or a client's prompt, does not let it end by itself."""
        logger.error("error: not shut down within %g seconds; a restart resumes what is kept", PATIENCE)
        os._exit(128 + self.number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the steps, then the connections; one that a client does not let end is cut, and no error."""
        await self.answers.close()
        said = logging.getLogger("uvicorn.error")
        said.disabled = True
        await super().shutdown(sockets)
        said.disabled = False


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
    scheduler = Scheduler(llm, settings.at_once, settings.queue)  # type: ignore[arg-type]
    answers = Answers(llm, scheduler, settings, store)
    config = uvicorn.Config(
        make_app(answers, settings, keys, Measures(scheduler)),
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
