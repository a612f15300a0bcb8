"""Servers of a tiny model: in this process, and in one that can be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.chats import calling_model, calling_tokenizer
from tests.cli.conftest import chatty_model, cli
from tokenswift import LLM
from tokenswift.cli import idle_training
from tokenswift.cli.main import main
from tokenswift.models.decoder import NativeTarget
from tokenswift.serve import idle
from tokenswift.serve.answer import STRETCH
from tokenswift.serve.answers import Answers
from tokenswift.serve.server import Server
from tokenswift.serve.settings import Settings, held

__all__ = ["cli"]
POSITIONS = 1024
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with a chat template."""
    return chatty_model(tmp_path_factory.mktemp("chatty") / "chatty", POSITIONS)


@pytest.fixture(scope="session")
def llm(chatty: Path) -> LLM:
    return LLM(chatty)


class Slow:
    """Passes of a model, or of a class of models, take ``pause`` seconds longer, and are
    counted."""

    def __init__(self, target: object, pause: float = 0.0) -> None:
        self.pause = pause
        self.passes = 0
        for name in ("forward", "forward_all"):
            setattr(target, name, self._slowed(getattr(target, name)))

    def _slowed(self, forward: Callable[..., object]) -> Callable[..., object]:
        def slowed(*args: object, **kwargs: object) -> object:
            self.passes += 1
            time.sleep(self.pause)
            return forward(*args, **kwargs)

        return slowed


@pytest.fixture(scope="session")
def slowed(chatty: Path) -> tuple[LLM, Slow]:
    """The same model once more, whose passes can be slowed down."""
    model = LLM(chatty)
    return model, Slow(model.target)


class Running:
    """A server in a thread of this process."""

    def __init__(self, llm: LLM, taken: socket.socket | None = None, **settings: Any) -> None:
        limits = Settings(port=0, **settings)
        self._held = ExitStack()
        self.server = Server(llm, limits, taken or self._held.enter_context(held(limits)))
        self._clients: list[openai.OpenAI] = []
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        assert until(lambda: self.server.started, 30)
        self.url = self.server.address

    @property
    def answers(self) -> Answers:
        return self.server.answers

    def client(self, key: str = "none", **more: Any) -> openai.OpenAI:
        """OpenAI's own, which never tries twice by itself."""
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **more
        )
        self._clients.append(client)
        return client

    def post(self, path: str, body: object = None, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **more)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        self._held.close()
        for client in self._clients:
            client.close()
        assert not self._thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until something is true; whether it is."""
    end = time.monotonic() + seconds
    is_true = true()
    while not is_true and time.monotonic() < end:
        time.sleep(0.01)
        is_true = true()
    return is_true


Start = Callable[..., Running]


@pytest.fixture
def start(llm: LLM) -> Iterator[Start]:
    """``start(run_dir=…)`` → a server, ended with the test; ``llm=`` for another model."""
    servers: list[Running] = []

    def begin(llm: LLM = llm, **settings: Any) -> Running:
        servers.append(Running(llm, **settings))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.fixture(scope="package")
def calling() -> Iterator[LLM]:
    """A model that calls a tool whenever it can, and says "ok" to its result."""
    with LLM.from_model(calling_model(), calling_tokenizer(), heads=None) as model:
        yield model


@pytest.fixture(scope="package")
def tools(calling: LLM) -> Iterator[Running]:
    """A server of that model."""
    running = Running(calling)
    yield running
    running.close()


@pytest.fixture(scope="package")
def server(llm: LLM) -> Iterator[Running]:
    """A server with usual settings, for tests that leave nothing behind."""
    running = Running(llm)
    yield running
    running.close()


class Process:
    """``tokenswift serve`` in a process of its own; its passes take ``pause`` seconds longer, and
    each step is an event."""

    def __init__(
        self, model: Path, folder: Path, *argv: str, pause: float = 0.0, port: int = 0
    ) -> None:
        self.log = folder.parent / f"{folder.name}.log"
        command = [sys.executable, "-m", "tests.serve.conftest", str(pause)]
        command += ["--model", str(model)]
        command += ["--run-dir", str(folder), "--port", str(port), "--threads", "1", *argv]
        with self.log.open("ab") as log:
            begun = log.tell()
            self._process = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log)
        while True:
            log_text = self.log.read_bytes()[begun:].decode()
            if "listening on " in log_text:
                break
            assert self._process.poll() is None, log_text
            time.sleep(0.02)
        self.url = log_text.partition("listening on ")[2].split()[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal; the exit code."""
        self.send(number)
        return self._process.wait(30)

    def is_running(self) -> bool:
        return self._process.poll() is None


Launch = Callable[..., Process]


@pytest.fixture
def launch(chatty: Path, tmp_path: Path) -> Iterator[Launch]:
    """``launch(pause=…)`` → a server in a process of its own, on the folder "answers" of the
    test."""
    processes: list[Process] = []

    def begin(**more: Any) -> Process:
        processes.append(Process(chatty, tmp_path / "answers", **more))
        return processes[-1]

    yield begin
    for process in processes:
        if process.is_running():
            process.end()


if __name__ == "__main__":
    STRETCH = 0.0
    idle.IDLE_SECONDS = 0.5
    idle_training.PROGRAM = "tests.serve.eager_child"
    Slow(NativeTarget, float(sys.argv[1]))
    sys.exit(main(["serve", *sys.argv[2:]]))
