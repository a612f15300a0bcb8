"""Runs the application: listens, waits for a signal, ends steps and says how to go on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tokenswift.engine.scheduler import Scheduler
from tokenswift.serve.answers import Answers
from tokenswift.serve.app import make_app
from tokenswift.serve.metrics import Measures
from tokenswift.serve.settings import Settings
from tokenswift.serve.store import Store
from tokenswift.types import InputError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST = 10  # seconds for connections to take what is left


class Server(uvicorn.Server):
    """uvicorn's, which ends answers before it waits for their connections; signals are ours.

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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal ends the server between two steps, a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        taken = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        for number in taken:
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    def _end(self, number: int) -> None:
        if self.number:
            os._exit(128 + number)
        self.number, self.should_exit = number, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the steps, then the connections."""
        await self.answers.close()
        await super().shutdown(sockets)


def make_server(llm: Any, settings: Settings) -> Server:
    """A server at its address that takes no request yet.

    Args:
        llm: the ``LLM``.
    Raises:
        InputError: an address, a folder or keys that cannot be had.
    """
    keys = settings.keys()
    store = None if settings.run_dir is None else Store(Path(settings.run_dir).expanduser())
    taken = bound(settings)
    scheduler = Scheduler(llm, settings.at_once, settings.queue)  # type: ignore[arg-type]
    measures = Measures(scheduler)
    answers = Answers(llm, scheduler, settings, store, measures)
    config = uvicorn.Config(
        make_app(answers, settings, keys, measures),
        http="h11",
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=LAST,
    )
    return Server(config, answers, taken)


def bound(settings: Settings) -> socket.socket:
    """A socket at the address.

    Raises:
        InputError: it cannot be had.
    """
    kind = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(kind, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        raise InputError(
            f"port is {settings.port}: it cannot be had on {settings.host} ({error.strerror or error}); "
            f"valid: a free one, or 0 for any",
            "port",
        ) from error
    return made
