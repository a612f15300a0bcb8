"""Connections of a server: how long a request's head may take, and how many one address has.

A connection *waits* until the head of a request has come whole, at first and again after each
answer. Who only opens connections holds nobody up: a waiting one ends after `HEAD_SECONDS`, and the
oldest ends when there are too many, of all or of its address. Requests themselves are limited by
`guard.Guard`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from typing import ClassVar

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenswift.serve.guard import HEALTH
from tokenswift.serve.refusals import Refused
from tokenswift.serve.settings import Settings

HEAD_SECONDS = 10.0  # that a client may take to send the head of a request
LATE_HEAD = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Places:
    """The connections of a server that wait, and how many each address has.

    Args:
        most_waiting: connections that may wait.
        most_per_address: connections that one address may have.
    """

    def __init__(self, most_waiting: int, most_per_address: int) -> None:
        self._most_waiting = most_waiting
        self._most_per_address = most_per_address
        self._by_address: Counter[str] = Counter()
        self._waiting: OrderedDict[LimitedProtocol, None] = OrderedDict()

    def enter(self, connection: LimitedProtocol) -> bool:
        """Count a new connection; the oldest waiting one of its address ends for it, where there
        are too many. Returns False where none waits that could."""
        address = connection.address
        self._by_address[address] += 1
        if self._by_address[address] <= self._most_per_address:
            return True
        oldest = next((one for one in self._waiting if one.address == address), None)
        if oldest is None:
            return False
        oldest.end()
        return True

    def leave(self, connection: LimitedProtocol) -> None:
        """A connection is gone."""
        self._waiting.pop(connection, None)
        self._by_address[connection.address] -= 1
        if self._by_address[connection.address] <= 0:
            del self._by_address[connection.address]

    def wait(self, connection: LimitedProtocol) -> None:
        """A connection waits; the oldest one ends where there are too many."""
        self._waiting[connection] = None
        while len(self._waiting) > self._most_waiting:
            oldest = next(iter(self._waiting))
            oldest.end()

    def stop_waiting(self, connection: LimitedProtocol) -> None:
        """A connection has sent a head, or ends."""
        self._waiting.pop(connection, None)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP connection, which waits for a request no longer than it may.

    Attributes:
        places: of the server.
        address: of the client.
    """

    places: ClassVar[Places]
    address = ""
    _timer: asyncio.TimerHandle | None = None
    _has_begun = False  # bytes of the head that it waits for have come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self.places.enter(self):
            self.app = self._refuse_address  # once it has sent a head, which it can read about
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self.places.leave(self)

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._has_begun = False
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """See whether it waits for the head of a request, or for the rest of a body whose request
        has been answered."""
        if self.transport.is_closing():
            return
        client_state = self.conn.their_state
        is_answered = client_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        waits = client_state is h11.IDLE or is_answered
        if waits and self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.end)
            self.places.wait(self)
        elif not waits and self._timer is not None:
            self._stop_timer()
            self.places.stop_waiting(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """End it while it waits."""
        self._stop_timer()
        self.places.stop_waiting(self)
        if self._has_begun and self.conn.our_state is h11.IDLE:
            self.transport.write(LATE_HEAD)
        self.transport.close()

    async def _refuse_address(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer that the address has too many connections; `/health` is answered
        all the same."""
        if scope["path"] == HEALTH:
            await self.config.loaded_app(scope, receive, send)  # type: ignore[arg-type]
            return
        text = "your address has as many connections as it may"
        refused = Refused(429, f"{text}; valid: another try in a moment")
        body = json.dumps(refused.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def protocol_of(settings: Settings) -> type[LimitedProtocol]:
    """The protocol of a server's connections, with its limits."""

    class ServerProtocol(LimitedProtocol):
        places = Places(settings.max_connections, settings.most_per_address)

    return ServerProtocol
