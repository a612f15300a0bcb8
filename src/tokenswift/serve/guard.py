"""In front of everything: who may ask, and how much; a line about each request; how one is refused."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from tokenswift.serve.settings import Settings
from tokenswift.types import InputError, shown

PATIENCE = 60.0  # seconds that a client may take to send a body
logger = logging.getLogger("tokenswift")
OPEN = ("/", "/health")  # what needs no key
#: a Host header: a name or address, and perhaps a port
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{0,5})?", re.IGNORECASE)

_UNION = re.compile(r"str|\w+\[.*\]")  # what pydantic calls the members of a union


class Refused(HTTPException):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: in one line.
        param: the field that is wrong.
        code: OpenAI's word for it.
        headers: of the reply.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(status, message, headers)
        self.body = error_body(message, status, param, code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = message.encode(errors="backslashreplace").decode()  # names may hold lone surrogates
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def wrong_fields(errors: Sequence[Any]) -> InputError:
    """What pydantic found first."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InputError(f"the body is not JSON ({first['ctx']['error']}); valid: a JSON object")
    place = [str(part) for part in first["loc"][1:] if not _UNION.fullmatch(str(part))]
    given = "missing" if first["type"] == "missing" else shown(first["input"])
    valid = first["msg"].removeprefix("Input should be ")
    return InputError(f"{'.'.join(place) or 'the body'} is {given}; valid: {valid}", next(iter(place), None))


class Guard:
    """ASGI middleware.

    Args:
        app: what is guarded.
        settings: the limits.
        keys: of clients; [] asks for none.
    """

    def __init__(self, app: Any, settings: Settings, keys: list[str]) -> None:
        self._app, self._settings = app, settings
        self._keys = [_hashed(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, size, most = time.perf_counter(), 0, 0, self._settings.max_body
        until: float | None = asyncio.get_running_loop().time() + PATIENCE

        async def answer(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async def limited() -> Message:
            nonlocal size, until
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                text = f"the body took more than {PATIENCE:g} seconds; valid: one that is sent at once"
                raise Refused(408, text, connection="close") from None
            until = until if message.get("more_body") else None  # what is received behind it is the end
            size += len(message.get("body", b""))
            if size > most:
                raise Refused(413, f"the body is longer than {most:,} bytes; valid: a shorter one")
            return message

        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_sender(scope["scheme"], headers)
            scope["state"]["client"] = self._check_key(scope["path"], headers)
            await self._app(scope, limited, answer)
        except Refused as refused:
            await JSONResponse(refused.body, refused.status_code)(scope, receive, answer)
        finally:
            self._log(scope, status, time.perf_counter() - begun)

    def _check_sender(self, scheme: str, headers: dict[str, str]) -> None:
        """Refuse pages of other sites: a browser sends their requests to this machine too."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        found = HOST.fullmatch(host)
        name = found and (found[1] or found[2])
        if self._settings.is_local and name not in ("localhost", "127.0.0.1", "::1", self._settings.host):
            raise Refused(403, "the Host header names another machine; valid: localhost or 127.0.0.1")
        if origin is not None and origin.lower() not in (f"{scheme}://{host}", *self._settings.cors):
            valid = "this server's own page, or one of --cors"
            raise Refused(403, f"the Origin header names another site; valid: {valid}")

    def _check_key(self, path: str, headers: dict[str, str]) -> str:
        """The key that the client shows; "" where none is asked for."""
        if not self._keys or path in OPEN:
            return ""
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = _hashed(key)
        known = [hmac.compare_digest(given, own) for own in self._keys]  # all of them: the time tells nothing
        if kind.lower() != "bearer" or not any(known):
            text = "the API key is missing or wrong; valid: Authorization: Bearer KEY"
            raise Refused(401, text, code="invalid_api_key")
        return key

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client, path = (scope.get("client") or ("-",))[0], ascii(scope["path"][:200])[1:-1]
        logger.info("%s %s %s %s %.3f s", client, scope["method"], path, status or "gone", seconds)


def _hashed(key: str) -> bytes:
    """A key, in a form that has one length."""
    return hashlib.sha256(key.encode()).digest()
