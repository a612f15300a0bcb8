"""In front of everything: who may ask, how much at once, and a line about each request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import prometheus_client as prometheus
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from tokenswift.checks import shown
from tokenswift.serve.errors import Refused
from tokenswift.serve.settings import Settings

PATIENCE = 60.0  # seconds that a client may take to send a body
#: figures of the scheduler → what they are called and say
FIGURES = {
    "running": ("running_texts", "Texts being written"),
    "reading": ("reading_texts", "Texts whose prompts are read"),
    "waiting": ("waiting_texts", "Texts that wait for their turn"),
    "rows": ("pass_rows", "Rows of the newest pass"),
    "steps": ("steps", "Steps of all texts: tokens by steps is the mean acceptance length"),
    "passes": ("passes", "Verify passes"),
    "tokens": ("tokens", "New tokens"),
    "drafted": ("drafted_tokens", "Drafted tokens that were checked"),
    "accepted": ("accepted_tokens", "Drafted tokens that were accepted"),
    "read": ("prompt_tokens", "Tokens of prompts that were read"),
    "reused": ("reused_tokens", "Tokens of prompts that were copied from another prompt's beginning"),
}
NOW = ("running", "reading", "waiting", "rows")  # the others count up


class Measures(Collector):
    """Figures for Prometheus: the scheduler's, requests by status, and the process's memory.

    Args:
        scheduler: an `engine.scheduler.Scheduler`.

    Attributes:
        requests: counts them by status.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._registry = scheduler, prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "tokenswift_requests", "Requests by status", ["status"], registry=self._registry
        )
        prometheus.ProcessCollector(namespace="tokenswift", registry=self._registry)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The scheduler's figures as they are now."""
        figures = self._scheduler.figures()
        for field, (name, text) in FIGURES.items():
            kind = GaugeMetricFamily if field in NOW else CounterMetricFamily
            yield kind(f"tokenswift_{name}", text, value=getattr(figures, field))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return prometheus.generate_latest(self._registry)


logger = logging.getLogger("tokenswift")
OPEN = ("/", "/health")  # what needs no key
#: a Host header: a name or address, and perhaps a port
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{0,5})?", re.IGNORECASE)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware.

    Args:
        app: what is guarded.
        settings: the limits.
        keys: of clients; [] asks for none.
        measures: counts requests.
    """

    def __init__(self, app: Any, settings: Settings, keys: list[str], measures: Measures) -> None:
        self._app, self._settings, self._measures = app, settings, measures
        self._keys = [_hashed(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, size, most = time.perf_counter(), 0, 0, self._settings.max_body
        until: float | None = asyncio.get_running_loop().time() + PATIENCE

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async def limited() -> MutableMapping[str, Any]:
            nonlocal size, until
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                text = f"the body took more than {PATIENCE:g} seconds; valid: one that is sent at once"
                raise HTTPException(408, text, {"connection": "close"}) from None
            until = until if message.get("more_body") else None  # what is received behind it is the end
            size += len(message.get("body", b""))
            if size > most:
                raise HTTPException(413, f"the body is longer than {most:,} bytes; valid: a shorter one")
            return message

        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_sender(scope["scheme"], headers)
            scope["state"]["client"] = self._check_key(scope["path"], headers)
            await self._app(scope, limited, answer)
        except Refused as refused:
            await JSONResponse(refused.body, refused.status)(scope, receive, answer)
        finally:
            self._measures.requests.labels(status).inc()
            self._log(scope, status, time.perf_counter() - begun)

    def _check_sender(self, scheme: str, headers: dict[str, str]) -> None:
        """Refuse pages of other sites: a browser sends their requests to this machine too."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        found = HOST.fullmatch(host)
        if host and found is None:
            raise Refused(400, f"the Host header is {shown(host)}; valid: a name or an address, and a port")
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
        shown = _hashed(key)
        known = [hmac.compare_digest(shown, own) for own in self._keys]  # all of them: the time tells nothing
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
