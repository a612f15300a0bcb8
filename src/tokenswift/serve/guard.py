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

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.responses import JSONResponse

from tokenswift.checks import shown
from tokenswift.serve.errors import Refused
from tokenswift.serve.settings import Settings
from tokenswift.serve.store import brief
from tokenswift.types import Step

disable_created_metrics()
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STEP_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Measures:
    """Counts steps, tokens and answers; asks the scheduler for the rest when it is looked at.

    Args:
        scheduler: an `engine.scheduler.Scheduler`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._registry = registry = CollectorRegistry(auto_describe=True)
        self._tokens = Counter("tokenswift_tokens", "New tokens", registry=registry)
        checked = "Drafted tokens that were checked"
        self._drafted = Counter("tokenswift_drafted_tokens", checked, registry=registry)
        accepted = "Drafted tokens that were accepted"
        self._accepted = Counter("tokenswift_accepted_tokens", accepted, registry=registry)
        times = {"buckets": STEP_SECONDS, "registry": registry}
        self._seconds = Histogram("tokenswift_step_seconds", "Time of a step of one text", **times)
        lengths = "Tokens of a step: the mean is the acceptance length"
        sizes = {"buckets": STEP_TOKENS, "registry": registry}
        self._lengths = Histogram("tokenswift_step_tokens", lengths, **sizes)
        self._answers = Counter("tokenswift_answers", "Answers by end", ("kind", "state"), registry=registry)
        self._requests = Counter("tokenswift_requests", "Requests by status", ("status",), registry=registry)
        registry.register(self)  # type: ignore[arg-type]

    def step(self, step: Step) -> None:
        """Count a step."""
        self._tokens.inc(len(step.token_ids))
        self._drafted.inc(step.drafted)
        self._accepted.inc(step.accepted)
        self._seconds.observe(step.seconds)
        self._lengths.observe(len(step.token_ids))

    def answer(self, kind: str, state: str) -> None:
        """Count an answer that is as whole as it gets."""
        self._answers.labels(kind, state).inc()

    def request(self, status: int) -> None:
        """Count a request."""
        self._requests.labels(status).inc()

    def collect(self) -> Iterator[Metric]:
        """What is looked up when it is asked for."""
        now = self._scheduler.figures()
        for name, text, value in (
            ("running_texts", "Texts being written", now.running),
            ("reading_texts", "Texts whose prompts are read", now.reading),
            ("waiting_texts", "Texts that wait for their turn", now.waiting),
            ("pass_rows", "Rows of the newest pass", now.rows),
            ("memory_bytes", "Memory that the process holds", psutil.Process().memory_info().rss),
        ):
            yield GaugeMetricFamily(f"tokenswift_{name}", text, value)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


logger = logging.getLogger("tokenswift")
OPEN = ("/", "/health")  # what needs no key
LOCAL = ("localhost", "127.0.0.1", "::1")
BODY_SECONDS = 60.0  # for a request to arrive
SHOWN = 2000  # characters of a prompt in the log
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
        begun, status, body = time.perf_counter(), 0, b""

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_sender(scope["scheme"], headers)
            scope["state"]["client"] = self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
            await self._app(scope, _again(body, receive), answer)
        except Refused as refused:
            await JSONResponse(refused.body, refused.status)(scope, receive, answer)
        finally:
            self._measures.request(status)
            self._log(scope, status, time.perf_counter() - begun, body)

    def _check_sender(self, scheme: str, headers: dict[str, str]) -> None:
        """Refuse pages of other sites: a browser sends their requests to this machine too."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        found = HOST.fullmatch(host)
        if host and found is None:
            raise Refused(400, f"the Host header is {shown(host)}; valid: a name or an address, and a port")
        name = found and (found[1] or found[2])
        if self._settings.is_local and name not in (*LOCAL, self._settings.host):
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

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        """The whole body, up to the limit."""
        most, parts, size = self._settings.max_body, [], 0
        wrong = Refused(413, f"the body is longer than {most:,} bytes; valid: a shorter one")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > most:
            raise wrong
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise wrong
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refused(408, f"the body took longer than {BODY_SECONDS:g} seconds") from None

    def _log(self, scope: Scope, status: int, seconds: float, body: bytes) -> None:
        path = brief(ascii(scope["path"][:200])[1:-1])
        client = (scope.get("client") or ("-",))[0]
        logger.info("%s %s %s %s %.3f s", client, scope["method"], path, status or "gone", seconds)
        if self._settings.log_prompts and body:
            logger.info("  %s", ascii(body.decode("utf-8", "replace"))[:SHOWN])


def _hashed(key: str) -> bytes:
    """A key, in a form that has one length."""
    return hashlib.sha256(key.encode()).digest()


def _again(body: bytes, receive: Receive) -> Receive:
    """The body once more, and then what follows it."""
    sent = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
