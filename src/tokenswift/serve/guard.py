"""In front of everything: who may ask, how much at once, and a line of the log for each request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenswift.serve.refusals import Refused, log_text
from tokenswift.serve.settings import Settings

logger = logging.getLogger("tokenswift")
HEALTH = "/health"
OPEN = ("/", HEALTH)  # what needs no key
BODY_SECONDS = 60.0  # that a client may take to send a body
#: a Host header: a name or address, and perhaps a port
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{0,5})?", re.IGNORECASE)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class LimitedBody:
    """Receives the body of a request, which may not take too long or be too large.

    Args:
        receive: what the server receives with.
        most: bytes of a body at most.
    """

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._size = 0
        self._until: float | None = asyncio.get_running_loop().time() + BODY_SECONDS

    async def __call__(self) -> Message:
        """The next message.

        Raises:
            Refused: the body is too slow or too large.
        """
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            text = f"the body took more than {BODY_SECONDS:g} seconds"
            raise Refused(
                408, f"{text}; valid: one that is sent at once", connection="close"
            ) from None
        if not message.get("more_body"):
            self._until = None  # what is received behind the body is the connection's end
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            text = f"the body is longer than {self._most:,} bytes"
            valid = "a shorter one, or tokenswift serve --max-body"
            raise Refused(413, f"{text}; valid: {valid}", connection="close")
        return message


class Guard:
    """ASGI middleware: who may ask, and how much; a line about each request.

    Args:
        app: what is guarded.
        settings: the limits, and the keys of clients.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode() for key in settings.keys()]
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self._under_way += 1
        try:
            self._admit(scope)
            limited = LimitedBody(receive, self._settings.max_body)
            await self._app(scope, limited, answer)
        except Refused as refused:
            reply = JSONResponse(refused.body, refused.status_code, refused.headers)
            await reply(scope, receive, answer)
        finally:
            self._under_way -= 1
            _log(scope, status, time.perf_counter() - begun)

    def _admit(self, scope: Scope) -> None:
        """Let a request in.

        Raises:
            Refused: there are too many, it comes from elsewhere, or its key is wrong.
        """
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._check_sender(scope["scheme"], headers)
        if self._under_way > self._settings.max_connections and scope["path"] != HEALTH:
            text = f"{self._settings.max_connections:,} requests are under way"
            raise Refused(503, f"{text}; valid: another try in a moment", **{"retry-after": "1"})
        scope["state"]["client"] = self._check_key(scope["path"], headers)

    def _check_sender(self, scheme: str, headers: dict[str, str]) -> None:
        """Refuse pages of other sites: a browser sends their requests to this machine too."""
        host = headers.get("host", "").lower()
        origin = headers.get("origin")
        begins = HOST.fullmatch(host)
        name = begins and (begins[1] or begins[2])
        settings = self._settings
        known = (*LOCAL_NAMES, settings.host.lower(), *settings.allowed_hosts)
        if settings.is_local and name not in known:
            valid = "localhost, 127.0.0.1, or a name given by --allowed-host NAME"
            raise Refused(403, f"the Host header names another machine; valid: {valid}")
        sites = (f"{scheme}://{host}", *settings.cors)
        if origin is not None and origin.lower() not in sites:
            valid = "this server's own page, or one of --cors"
            raise Refused(403, f"the Origin header names another site; valid: {valid}")

    def _check_key(self, path: str, headers: dict[str, str]) -> str:
        """The key that the client shows; "" where none is asked for."""
        if not self._keys or path in OPEN:
            return ""
        kind, _, key = headers.get("authorization", "").partition(" ")
        shown_key = key.encode()
        matches = [hmac.compare_digest(shown_key, known) for known in self._keys]  # each, always
        if kind.lower() != "bearer" or not any(matches):
            text = "the API key is missing or wrong; valid: Authorization: Bearer KEY"
            raise Refused(401, text, code="invalid_api_key")
        return key


def _log(scope: Scope, status: int, seconds: float) -> None:
    """A line about a request; whatever comes from a client is escaped."""
    client = scope.get("client") or ("-",)
    logger.info(
        "%s %s %s %s %.3f s",
        log_text(str(client[0]), 60),
        log_text(scope["method"], 20),
        log_text(scope["path"]),
        status or "gone",
        seconds,
    )
