"""Clients that hold connections do not keep others from the server."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.serve.conftest import Running, Slow, Start
from tokenswift import LLM
from tokenswift.serve import connections

HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
KEY = "a-key-of-a-client"


class Clients:
    """Raw connections to a server."""

    def __init__(self, server: Running) -> None:
        self.port = int(server.url.rpartition(":")[2])
        self.stack = ExitStack()

    def connect(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        address = ("127.0.0.1", self.port)
        client = self.stack.enter_context(
            socket.create_connection(address, 10, source_address=(source, 0))
        )
        client.sendall(sent)
        return client

    def hold(self, source: str = "127.0.0.1") -> socket.socket:
        """A request under way, whose body does not come."""
        client = self.connect(POST + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n", source)
        assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
        return client

    def ask(self, request: bytes = HEAD + b"\r\n", source: str = "127.0.0.1") -> bytes:
        closing = request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
        return received(self.connect(closing, source))


def received(client: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    parts = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts += part
    return parts


@pytest.fixture
def few(start: Start) -> Iterator[Clients]:
    """Of a server with room for eight connections, four of an address."""
    clients = Clients(start(max_connections=8))
    with clients.stack:
        yield clients


def test_half_open_connections_shut_nobody_out(few: Clients) -> None:
    silent = [few.connect() for _ in range(20)]
    begun = [few.connect(HEAD) for _ in range(20)]
    assert few.ask().startswith(b"HTTP/1.1 200 ")
    received(silent[0])
    received(begun[0])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one local address")
def test_one_address_ends_its_own_connections_first(few: Clients) -> None:
    other = few.connect(HEAD, "127.0.0.2")
    for _ in range(30):
        few.connect(HEAD)
    other.sendall(b"connection: close\r\n\r\n")
    assert received(other).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begins", [b"", HEAD], ids=["silent", "begun"])
def test_a_head_has_to_come_in_time(
    server: Running, monkeypatch: pytest.MonkeyPatch, begins: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    clients = Clients(server)
    with clients.stack:
        client = clients.connect(begins)
        start_time = time.monotonic()
        assert received(client)[:13] == (b"HTTP/1.1 408 " if begins else b"")
        assert time.monotonic() - start_time < 5


def test_a_second_head_has_to_come_in_time_too(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    clients = Clients(server)
    with clients.stack:
        client = clients.connect(HEAD + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(HEAD)
        assert b"HTTP/1.1 408 " in received(client)


def test_a_head_that_came_keeps_its_time(start: Start, slowed: tuple[LLM, Slow]) -> None:
    """An answer may take longer than a head."""
    llm, slow = slowed
    slow.pause = 0.02
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEAD_SECONDS", 0.1)
        server = start(llm)
        body = {"prompt": "hello", "max_tokens": 20, "tokenswift": {"ignore_eos": True}}
        reply = server.post("/v1/completions", body)
    slow.pause = 0.0
    assert reply.json()["usage"]["completion_tokens"] == 20


def test_a_refused_body_does_not_hold_a_place(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    clients = Clients(start(api_key=KEY))
    with clients.stack:
        client = clients.connect(POST + b"content-length: 900\r\n\r\n{")
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")
        with contextlib.suppress(OSError):
            for _ in range(50):
                client.sendall(b" ")
                time.sleep(0.02)
                if client.recv(1, socket.MSG_DONTWAIT) == b"":
                    break
        received(client)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one local address")
def test_requests_are_as_many_as_may_be(few: Clients) -> None:
    """Those under way: one more is refused, but for the question whether the server is well."""
    for number in range(8):
        few.hold(f"127.0.0.{2 + number // 4}")
    body = POST + b"content-length: 2\r\n\r\n{}"
    reply = few.ask(body)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in reply
    assert b"8 requests are under way; valid: another try in a moment" in reply
    assert few.ask().startswith(b"HTTP/1.1 200 ")


def test_an_address_has_as_many_requests_as_it_may(few: Clients) -> None:
    for _ in range(4):
        few.hold()
    body = POST + b"content-length: 2\r\n\r\n{}"
    reply = few.ask(body)
    assert reply.startswith(b"HTTP/1.1 429 ")
    assert b"your address has as many connections as it may" in reply
    assert few.ask().startswith(b"HTTP/1.1 200 ")


def test_connections_that_end_leave_their_places(few: Clients) -> None:
    for _ in range(20):
        few.hold().close()
        time.sleep(0.01)
    assert few.ask(POST + b"content-length: 2\r\n\r\n{}").startswith(b"HTTP/1.1 400 ")
