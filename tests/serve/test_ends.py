"""What a server says of itself, how it begins, and that it ends whatever is under way."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Call
from tests.serve.conftest import Launch, Running, Start
from tests.serve.test_going_on import CALL, Reader
from tokenswift import InputError
from tokenswift.engine import scheduler as scheduling
from tokenswift.serve import responses as response
from tokenswift.serve.answers import CANCELLED, ENDS, GONE, Answer, Answers
from tokenswift.serve.schemas import Responses
from tokenswift.serve.settings import Settings
from tokenswift.serve.store import Record

KEY = "a-key-of-a-client"
LONG: dict[str, Any] = {**CALL, "max_output_tokens": 900, "background": True}


def health(server: Running) -> tuple[int, str]:
    found = server.get("/health")
    return found.status_code, found.json()["status"]


# ---- health -------------------------------------------------------------------------------------


def test_health_where_no_step_is_made(start: Start, slowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is a thousand times as fast as ours."""
    llm, slow = slowed
    monkeypatch.setattr(scheduling, "monotonic", lambda: 1000 * time.monotonic())
    server = start(llm)
    time.sleep(0.1)
    assert health(server) == (200, "ok"), "there is nothing to do"
    slow.pause = 0.3
    name = server.post("/v1/responses", LONG).json()["id"]
    for _ in range(200):
        if (found := health(server)) == (503, "stalled"):
            break
    slow.pause = 0.0
    server.post(f"/v1/responses/{name}/cancel")
    assert found == (503, "stalled") and health(server) == (200, "ok")


def test_health_where_nothing_can_be_written_any_more(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()

    def fault(self: Any) -> None:
        raise ValueError("a fault of the scheduler")

    monkeypatch.setattr(scheduling.Scheduler, "_admit", fault)
    server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
    for _ in range(200):
        if health(server) != (200, "ok"):
            break
    assert health(server) == (503, "failed")
    found = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
    assert found.status_code == 503 and "cannot write any more" in found.json()["error"]["message"]


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_ends_a_server_that_hangs(launch: Launch) -> None:
    """In a pass of a minute; the answer goes on with the next server."""
    process, reader = launch(pause=0.01), Reader()
    reader.read(process.url, 8, background=True)
    process.hangs.touch()
    time.sleep(0.5)
    assert process.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert "error: no end came within 8 seconds" in process.log.read_text()
    process.hangs.unlink()
    process = launch()
    reader.read(process.url, 10**6)
    assert process.end(signal.SIGTERM) == 0 and reader.end == "max_output_tokens"


@pytest.mark.slow
def test_a_signal_ends_a_draft(launch: Launch) -> None:
    """Between two of its passes, which take longer together than a signal waits."""
    process = launch(pause=0.4)
    own = {"strategy": "magicdec", "strategy_options": {"gamma": 32}, "ignore_eos": True}
    body = {"prompt": "hello", "max_tokens": 900, "stream": True, "tokenswift": own}
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        time.sleep(1.5)
        assert process.end(signal.SIGTERM) == 0
    assert "error" not in process.log.read_text()


@pytest.mark.slow
def test_connections_that_do_not_end_are_no_error(launch: Launch) -> None:
    """A request of which only a part has come, and one whose client reads nothing."""
    process = launch(pause=0.0)
    host, port = process.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": True})
    with ExitStack() as held:
        for length, sent in ((10**6, body), (len(body), body)):
            client = held.enter_context(socket.create_connection((host, int(port)), 30))
            head = f"POST /v1/responses HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {length}\r\n\r\n{sent}".encode())
        time.sleep(0.5)
        assert process.end(signal.SIGTERM) == 0
    said = process.log.read_text()
    assert "ended" in said and not any(word in said for word in ("error", "Error", "Traceback", "Cancel"))


@pytest.mark.slow
def test_a_second_signal_does_not_wait(launch: Launch) -> None:
    process, reader = launch(pause=0.01), Reader()
    reader.read(process.url, 8, background=True)
    process.hangs.touch()
    time.sleep(0.5)
    process.send(signal.SIGINT)
    time.sleep(0.2)
    assert process.end(signal.SIGINT) == 130 and "no end came" not in process.log.read_text()


# ---- what is taken up ---------------------------------------------------------------------------


def test_what_is_taken_up_is_queued(
    start: Start, slowed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next server has begun it, too: a client that polls would take it for ended."""
    llm, slow = slowed
    slow.pause = 0.01
    server = start(llm, run_dir=str(tmp_path / "answers"))
    name = server.post("/v1/responses", LONG).json()["id"]
    server.close()
    slow.pause = 0.0
    goes_on, real = threading.Event(), Answers._go_on

    async def later(self: Answers, left: list[Answer]) -> None:
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        await real(self, left)

    monkeypatch.setattr(Answers, "_go_on", later)
    again = start(llm, run_dir=str(tmp_path / "answers"))
    assert again.get(f"/v1/responses/{name}").json()["status"] == "queued"
    goes_on.set()
    for _ in range(600):
        found = again.get(f"/v1/responses/{name}").json()
        if found["status"] == "incomplete":
            break
        assert found["status"] in ("queued", "in_progress")
        time.sleep(0.05)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("background", "kept", "stopped", "status"),
    [
        (True, True, "", "queued"),
        (True, False, "", "queued"),
        (True, True, ENDS, "queued"),
        (True, False, ENDS, "incomplete"),
        (True, True, CANCELLED, "cancelled"),
        (False, True, CANCELLED, "cancelled"),
        (False, True, "", "incomplete"),
        (False, True, GONE, "incomplete"),
    ],
)
def test_where_an_answer_stands(background: bool, kept: bool, stopped: str, status: str) -> None:
    """One that is neither written now nor whole."""
    record = Record("resp_" + "0" * 32, "response", 0, {}, 0, [1])
    answer = Answer(record, Responses.model_validate({"input": "x", "background": background}))
    answer.kept, answer.stopped = kept, stopped
    assert response.status(answer) == status


# ---- the beginning ------------------------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing loads a model."""

    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("tokenswift.cli.options.load_model", load)


def test_what_is_taken_is_said_before_the_model_is_loaded(
    cli: Call, chatty: Path, start: Start, tmp_path: Path, unloaded: None
) -> None:
    server = start(run_dir=str(tmp_path / "answers"))
    port = server.url.rpartition(":")[2]
    done = cli("serve", "--model", chatty, "--port", port)
    assert done.code == 2 and done.error.startswith(f"--port is {port}: it cannot be opened on 127.0.0.1")
    done = cli("serve", "--model", chatty, "--port", "0", "--run-dir", tmp_path / "answers")
    assert done.code == 2 and "is being written by process" in done.error


def test_keys_by_option_and_environment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("a-key-of-the-file\n")
    monkeypatch.setenv("TOKENSWIFT_API_KEY", "a-key-by-environment")
    settings = Settings(host="0.0.0.0", api_key=KEY, api_key_file=str(tmp_path / "keys"))
    assert settings.keys() == [KEY, "a-key-by-environment", "a-key-of-the-file"]
    assert Settings(host="0.0.0.0").keys() == ["a-key-by-environment"]
    server = start()
    assert server.get("/v1/models").status_code == 401
    shown = {"authorization": "Bearer a-key-by-environment"}
    assert server.get("/v1/models", headers=shown).status_code == 200
    monkeypatch.setenv("TOKENSWIFT_API_KEY", "")
    assert Settings().keys() == []
    with pytest.raises(InputError, match="^host is "):
        Settings(host="0.0.0.0")


@pytest.mark.parametrize(
    "key", ["short-key", "a key with spaces in it", "schlüssel-des-klienten", "", "tab\t" * 5]
)
def test_keys_that_are_none_are_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    valid = "characters; valid: at least 16, of ASCII, without spaces$"
    with pytest.raises(InputError, match=f"^api_key has {len(key)} {valid}") as caught:
        Settings(api_key=key).keys()
    assert not key or key not in str(caught.value)
    if key:
        monkeypatch.setenv("TOKENSWIFT_API_KEY", key)
        with pytest.raises(InputError, match=f"^TOKENSWIFT_API_KEY has {len(key)} {valid}"):
            Settings().keys()


def test_options_of_the_command(cli: Call, chatty: Path, unloaded: None) -> None:
    asked = ("serve", "--model", chatty, "--port", "0")
    done = cli(*asked, "--api-key", "short")
    assert done.code == 2 and done.error.startswith("--api-key has 5 characters; valid: ")
    done = cli(*asked, "--cors", "https://a.example", "--cors", "*")
    assert done.code == 2 and done.error.startswith("--cors is '*'; valid: a site such as ")
