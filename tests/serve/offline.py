"""Clients that others wrote do not reach beyond this machine: a fixture of the modules that import it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No client reaches beyond this machine, be it for telemetry or for a tokenizer; none stays connected."""
    for name in ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")
    beyond: list[Any] = []
    opened: list[socket.socket] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def refuse_unless_here(host: Any) -> None:
        if host not in ("127.0.0.1", "localhost"):
            beyond.append(host)
            raise OSError(f"{host} is not this machine")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            refuse_unless_here(address[0])
        opened.append(self)
        connect(self, address)

    def guarded_look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_unless_here(host)
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)
    yield
    for one in opened:
        one.close()  # or the garbage collector may find it open in a later test
    assert beyond == []
