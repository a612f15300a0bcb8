"""Clients that go away and servers that die: no token is lost, none comes twice, the text is the
same."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Call
from tests.serve.conftest import Launch, Running, Start, until
from tokenswift import LLM, InputError
from tokenswift.engine import scheduler as scheduling
from tokenswift.serve import answer as answer_module
from tokenswift.serve.settings import Settings

NEW = 160
CALL: dict[str, Any] = {
    "input": [{"role": "user", "content": "Tell me all."}],
    "max_output_tokens": NEW,
    "seed": 7,
    "tokenswift": {"ignore_eos": True},
}


def text_of(llm: LLM, new: int) -> str:
    """The text of plain decoding."""
    return llm.generate(CALL["input"], new, "autoregressive", seed=7, ignore_eos=True).text


@pytest.fixture
def wanted(llm: LLM) -> str:
    return text_of(llm, NEW)


class Reader:
    """A client that keeps what it has seen of an answer, and takes it up where it was."""

    def __init__(self, new: int = NEW) -> None:
        self.new = new
        self.name = ""
        self.number = -1
        self.text = self.end = ""

    def read(self, url: str, most: int) -> None:
        """Read up to ``most`` events, then go away in the middle of the stream."""
        if self.name:
            query = {"stream": "true", "starting_after": str(self.number)}
            how: Any = ("GET", f"{url}/v1/responses/{self.name}")
            request: dict[str, Any] = {"params": query}
        else:
            how = ("POST", f"{url}/v1/responses")
            body = {**CALL, "max_output_tokens": self.new, "stream": True, "background": True}
            request = {"json": body}
        with httpx.stream(*how, **request, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.take(json.loads(line.removeprefix("data: ")))
                    most -= 1
                    if not most or self.end:
                        return

    def take(self, event: dict[str, Any]) -> None:
        """One event; each number is greater than those before."""
        if event["type"] == "response.incomplete" and not event["response"]["usage"]:
            return  # the server ends: the number is that of the newest token
        assert event["sequence_number"] > self.number, event
        self.number = event["sequence_number"]
        if event["type"] == "response.created":
            self.name = event["response"]["id"]
        elif event["type"] == "response.output_text.delta":
            self.text += event["delta"]
        elif event["type"] == "response.output_text.done":
            assert event["text"] == self.text
        elif event["type"] == "response.incomplete":
            self.end = event["response"]["incomplete_details"]["reason"]

    def check(self, wanted: str) -> None:
        assert self.text == wanted
        assert self.end == "max_output_tokens"
        assert self.number >= 3 + self.new


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_ends_the_steps(
    start: Start, slowed: Any, path: str, stream: bool
) -> None:
    llm, slow = slowed
    server = start(llm)
    slow.pause = 0.03
    fields = {"/v1/responses": "input", "/v1/completions": "prompt"}
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body: dict[str, object] = {"stream": stream, length: 900, "tokenswift": {"ignore_eos": True}}
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    body |= {fields[path]: "hello"} if path in fields else chat
    content = json.dumps(body).encode()
    passes = slow.passes
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        assert until(lambda: slow.passes > passes + 2)
    try:
        quiet = "tokenswift_running 0\n"
        assert until(lambda: quiet in server.get("/metrics").text), "steps go on without a client"
        assert slow.passes < passes + 300
    finally:
        slow.pause = 0.0


@pytest.mark.parametrize("is_stored", [True, False])
def test_disconnects(
    start: Start,
    slowed: Any,
    wanted: str,
    tmp_path: Path,
    is_stored: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five, at random; the answer goes on meanwhile."""
    llm, slow = slowed
    monkeypatch.setattr(answer_module, "STRETCH", 0.0)
    server = start(llm, **({"run_dir": str(tmp_path / "answers")} if is_stored else {}))
    slow.pause = 0.02
    chance = random.Random(3)
    reader = Reader()
    gone = 0
    while not reader.end:
        passes = slow.passes
        reader.read(server.url, chance.randint(4, 12) if gone < 5 else 10**6)
        if not reader.end:
            gone += 1
            assert until(lambda passes=passes: slow.passes > passes + 3)
    slow.pause = 0.0
    assert gone > 2
    reader.check(wanted)


@pytest.mark.slow
def test_the_server_dies(launch: Launch, wanted: str) -> None:
    """Twice, while a client reads."""
    reader = Reader()
    chance = random.Random(5)
    process = launch(pause=0.01)
    for pause in (0.01, 0.0):
        reader.read(process.url, chance.randint(5, 20))
        assert not reader.end
        time.sleep(chance.random() * 0.2)
        process.end(signal.SIGKILL)
        process = launch(pause=pause)
    reader.read(process.url, 10**6)
    process.end(signal.SIGTERM)
    reader.check(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_a_signal_ends_steps_and_says_how_to_go_on(
    launch: Launch, wanted: str, tmp_path: Path, number: int, code: int
) -> None:
    process = launch(pause=0.01)
    reader = Reader()
    reader.read(process.url, 10)
    assert process.end(number) == code
    log_text = process.log.read_text()
    assert (
        f"1 answer is unfinished; continue with: tokenswift serve --run-dir {tmp_path / 'answers'}"
        in log_text
    )
    assert ("error" in log_text) == (code != 0)
    process = launch()
    reader.read(process.url, 10**6)
    process.end(signal.SIGTERM)
    reader.check(wanted)


def test_more_is_open_than_the_queue_holds(
    start: Start, slowed: Any, wanted: str, tmp_path: Path
) -> None:
    """The next server goes on with all of it, one after the other."""
    llm, slow = slowed
    folder = str(tmp_path / "answers")
    server = start(llm, run_dir=folder, max_concurrent=1, queue=8)  # the last one does not begin
    slow.pause = 0.05
    body = {**CALL, "background": True}
    names = [server.post("/v1/responses", body).json()["id"] for _ in range(4)]
    server.close()
    passes = slow.passes
    again = start(llm, run_dir=folder, max_concurrent=1, queue=0)
    assert until(lambda: slow.passes > passes), "no answer of the background has the only place"
    assert again.get(f"/v1/responses/{names[3]}").json()["status"] == "queued"
    assert again.post(f"/v1/responses/{names[3]}/cancel").json()["status"] == "cancelled"
    slow.pause = 0.0
    for name in names[:3]:
        reader = Reader()
        reader.name = name
        reader.read(again.url, 10**6)
        reader.check(wanted)
    assert again.get(f"/v1/responses/{names[3]}").json()["status"] == "cancelled"


def test_what_ends_with_its_client(start: Start, slowed: Any, tmp_path: Path) -> None:
    """A response that is not of the background is cancelled, and stays so; what was written is
    there."""
    llm, slow = slowed
    server = start(llm, run_dir=str(tmp_path / "answers"))
    slow.pause = 0.02
    body = {**CALL, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as response:
        name = response.headers["x-answer-id"]
        assert any("output_text.delta" in line for line in response.iter_lines())
    url = f"/v1/responses/{name}"
    assert until(lambda: server.get(url).json()["status"] == "cancelled")
    slow.pause = 0.0
    server.close()
    stored = start(llm, run_dir=str(tmp_path / "answers")).get(url).json()
    assert stored["status"] == "cancelled"
    assert stored["output"][0]["content"][0]["text"]


def test_damage_on_the_disk(
    start: Start, llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that cannot be read is left alone; the others are there."""
    folder = tmp_path / "answers"
    server = start(run_dir=str(folder))
    names = [
        server.post("/v1/responses", {**CALL, "seed": seed}).json()["id"] for seed in (1, 2, 3)
    ]
    server.close()
    (folder / names[0] / "answer.json").write_text("{}")
    journal = folder / names[1] / "0" / "journal"
    journal.write_bytes(journal.read_bytes().replace(b'"ids"', b'"idz"'))
    again = start(run_dir=str(folder))
    assert [again.get(f"/v1/responses/{name}").status_code for name in names] == [404, 404, 200]
    assert "cannot be read" in caplog.text
    assert "is damaged at byte" in caplog.text


# ---- what a server says of itself, and that it ends whatever is under way ------------------------

KEY = "a-key-of-a-client"
LONG: dict[str, object] = {**CALL, "max_output_tokens": 900, "background": True}


def health(server: Running) -> tuple[int, str]:
    reply = server.get("/health")
    return reply.status_code, reply.json()["status"]


# ---- health --------------------------------------------------------------------------------------


def test_health_where_no_step_is_made(
    start: Start, slowed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that is a thousand times as fast as ours."""
    llm, slow = slowed
    monkeypatch.setattr(scheduling, "monotonic", lambda: 1000 * time.monotonic())
    server = start(llm)
    time.sleep(0.1)
    assert health(server) == (200, "ok"), "there is nothing to do"
    slow.pause = 0.3
    name = server.post("/v1/responses", LONG).json()["id"]
    assert until(lambda: health(server) == (503, "stalled"))
    slow.pause = 0.0
    server.post(f"/v1/responses/{name}/cancel")
    assert health(server) == (200, "ok")


# ---- the beginning -------------------------------------------------------------------------------


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
    assert done.code == 2
    assert done.error.startswith(f"--port is {port}: it cannot be opened on 127.0.0.1")
    done = cli("serve", "--model", chatty, "--port", "0", "--run-dir", tmp_path / "answers")
    assert done.code == 2
    assert "is being written by another process" in done.error


def test_keys_by_option_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("a-key-of-the-file\n")
    monkeypatch.setenv("TOKENSWIFT_API_KEY", "a-key-by-environment")
    settings = Settings(host="0.0.0.0", api_key=KEY, api_key_file=str(tmp_path / "keys"))
    assert settings.keys() == [KEY, "a-key-by-environment", "a-key-of-the-file"]
    monkeypatch.setenv("TOKENSWIFT_API_KEY", "")
    assert Settings().keys() == []
    with pytest.raises(InputError, match="^host is "):
        Settings(host="0.0.0.0")
    with pytest.raises(InputError, match="^a key has 5 characters; valid: at least 16"):
        Settings(api_key="short").keys()
