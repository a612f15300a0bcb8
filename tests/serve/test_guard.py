"""Who may ask, how much, and what the log says of it."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.conftest import Running, Start, until
from tokenswift.serve import guard
from tokenswift.serve.base import Body
from tokenswift.serve.settings import Settings, held, loading

KEY = "k" * 32
OTHER = "another-key-of-a-client"
HELLO: dict[str, object] = {"prompt": "hello", "max_tokens": 4}


LONG_BODY = (
    "the body is longer than 300 bytes; valid: a shorter one, or tokenswift serve --max-body"
)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    return str(tmp_path / "keys")


def test_the_key(start: Start, keys: str) -> None:
    server = start(api_key_file=keys)
    for key in (KEY, OTHER):
        assert server.client(key).models.list().data
        assert server.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code == 200
    shown = [KEY[:-1], KEY[:1], KEY + "k", KEY.upper(), "none", f"{KEY},{OTHER}"]
    for key in shown:
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            reply = server.get(path, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 401, key
            assert reply.json()["error"]["code"] == "invalid_api_key", key
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        server.client("wrong").completions.create(model="chatty", prompt="x")
    assert (
        server.get("/v1/models").status_code
        == server.post("/v1/completions", HELLO).status_code
        == 401
    )
    assert server.get("/v1/models", headers={"authorization": f"Basic {KEY}"}).status_code == 401
    assert server.get("/").status_code == server.get("/health").status_code == 200


def test_limits(start: Start) -> None:
    server = start(max_tokens=8, max_prompt=5, max_body=300)
    wrong: list[tuple[dict[str, object], int, str]] = [
        ({"prompt": "hey", "max_tokens": 9}, 400, "max_tokens is 9; valid: an integer from 1 to 8"),
        ({"prompt": "hello!", "max_tokens": 4}, 400, "the prompt is 7 tokens; valid: up to 5"),
        ({"prompt": "h" * 300}, 413, LONG_BODY),
    ]
    for body, status, message in wrong:
        reply = server.post("/v1/completions", body)
        assert reply.status_code == status
        assert reply.json()["error"]["message"] == message
    assert (
        server.post("/v1/completions", {"prompt": "hey"}).json()["usage"]["completion_tokens"] <= 8
    )
    parts = (b"x" * 100 for _ in range(10))  # no length ahead
    assert httpx.post(f"{server.url}/v1/completions", content=parts).status_code == 413


def test_a_body_that_does_not_come(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends a byte now and then does not hold a place for ever."""
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30) as client:
        client.sendall(f"{head}content-length: 900\r\n\r\n".encode())
        received = b""
        while part := client.recv(65536):  # until the server closes it
            received += part
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"the body took more than 0.3 seconds; valid: " in received


def test_a_full_queue(start: Start, slowed: Any) -> None:
    llm, slow = slowed
    slow.pause = 0.02
    server = start(llm, max_concurrent=1, queue=1)
    client = server.client()
    call: Any = {"model": "chatty", "input": "hello", "max_output_tokens": 500, "background": True}
    call["extra_body"] = {"tokenswift": {"ignore_eos": True}}
    begun = [client.responses.create(**call).id]
    assert until(lambda: client.responses.retrieve(begun[0]).status == "in_progress")
    begun.append(client.responses.create(**call).id)
    with pytest.raises(openai.RateLimitError) as caught:
        client.responses.create(**call)
    assert caught.value.status_code == 429
    assert caught.value.response.headers["retry-after"]
    for name in begun:
        client.responses.cancel(name)
    slow.pause = 0.0
    assert client.responses.create(**{**call, "max_output_tokens": 3, "background": False}).id


def server_log(caplog: pytest.LogCaptureFixture) -> str:
    """What was logged, but for what this process's clients say."""
    return "\n".join(one.getMessage() for one in caplog.records if not one.name.startswith("http"))


def test_prompts_are_never_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    secret = "sesame-street-4711"
    with caplog.at_level(logging.DEBUG):
        server = start()
        server.post("/v1/completions", {"prompt": secret, "max_tokens": 3})
        server.post(
            "/v1/responses", {"input": secret, "instructions": secret, "max_output_tokens": 3}
        )
        server.post("/v1/completions", {"prompt": secret, "temperature": -1})
        server.post("/v1/completions", {"prompt": [secret, 5]})
        server.post("/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]})
        server.get(f"/v1/responses?q={secret}")
        server.close()
    assert secret not in server_log(caplog)
    assert " POST /v1/completions 200 " in server_log(caplog)


def test_metrics(start: Start) -> None:
    server = start()
    server.post(
        "/v1/completions", {"prompt": "hello", "max_tokens": 30, "tokenswift": {"ignore_eos": True}}
    )
    lines = dict(line.split(" ") for line in server.get("/metrics").text.splitlines())
    assert int(lines["tokenswift_tokens"]) == 30 >= int(lines["tokenswift_steps"]) > 0
    assert lines["tokenswift_running"] == lines["tokenswift_waiting"] == "0"


def test_no_path_comes_from_a_client(start: Start, tmp_path: Path) -> None:
    server = start(run_dir=str(tmp_path / "answers"))
    for name in (
        "../keys",
        "..%2f..%2fetc%2fpasswd",
        "resp_" + "0" * 31,
        "resp_" + "g" * 32,
        "lock",
        "%00",
    ):
        assert server.get(f"/v1/responses/{name}").status_code == 404, name
    key = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 4}).json()["id"]
    server.post("/v1/completions", HELLO)
    assert sorted(p.name for p in (tmp_path / "answers").iterdir()) == sorted(["lock", key])
    assert (tmp_path / "answers" / key).stat().st_mode & 0o077 == 0


def test_the_server_ends_while_an_answer_is_read(start: Start, slowed: Any) -> None:
    """The stream says so in OpenAI's form; nothing hangs."""
    llm, slow = slowed
    slow.pause = 0.02
    server = start(llm)
    body = {
        "prompt": "hello",
        "max_tokens": 900,
        "stream": True,
        "tokenswift": {"ignore_eos": True},
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert "choices" in next(lines)
        server.server.should_exit = True
        *_, last = lines
    slow.pause = 0.0
    assert (
        json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
    )


def test_the_server_ends_before_an_answer_has_begun(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it, and nothing of it is left."""
    server = start(run_dir=str(tmp_path / "answers"))
    reads = threading.Event()
    ends = threading.Event()
    real = Body.request

    def slow(self: Body, *args: Any) -> Any:
        reads.set()
        assert ends.wait(30)
        return real(self, *args)

    close = server.answers.scheduler.close
    monkeypatch.setattr(Body, "request", slow)
    monkeypatch.setattr(server.answers.scheduler, "close", lambda: (ends.set(), close()))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "/v1/responses", {"input": "hello", "background": True})
        assert reads.wait(30)
        server.close()
        reply = waiting.result()
    assert reply.status_code == 503
    assert "the server is shutting down" in reply.json()["error"]["message"]
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["lock"]


# ---- clients do not see each other: no answer, and no prompt by its time -------------------------

CALL: dict[str, object] = {
    "input": "hello",
    "max_output_tokens": 5,
    "tokenswift": {"ignore_eos": True},
}
SHARED = "What everybody begins with, and which is long enough to be worth a copy. " * 3


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_an_answer_belongs_to_its_key(start: Start, keys: str, slowed: Any) -> None:
    llm, slow = slowed
    slow.pause = 0.01
    server = start(llm, api_key_file=keys)
    body = {**CALL, "max_output_tokens": 400, "background": True}
    name = server.post("/v1/responses", body, headers=shown(KEY)).json()["id"]
    nothing = server.get(f"/v1/responses/resp_{'0' * 32}", headers=shown(OTHER))
    for reply in (
        server.get(f"/v1/responses/{name}", headers=shown(OTHER)),
        server.get(f"/v1/responses/{name}?stream=true", headers=shown(OTHER)),
        server.post(f"/v1/responses/{name}/cancel", headers=shown(OTHER)),
    ):
        assert reply.status_code == 404 == nothing.status_code
        wanted = nothing.json()["error"]["message"].replace("0" * 32, name.removeprefix("resp_"))
        assert reply.json()["error"]["message"] == wanted, "it says that there is something"
    goes_on = {**CALL, "previous_response_id": name}
    assert (
        "there is no response" in server.post("/v1/responses", goes_on, headers=shown(OTHER)).text
    )
    assert httpx.delete(f"{server.url}/v1/responses/{name}", headers=shown(OTHER)).is_error
    response = server.get(f"/v1/responses/{name}", headers=shown(KEY)).json()
    assert response["status"] in ("queued", "in_progress"), "another client has stopped it"
    for _ in range(2):
        reply = server.post(f"/v1/responses/{name}/cancel", headers=shown(KEY))
        assert reply.json()["status"] == "cancelled"
    passes = slow.passes
    time.sleep(0.1)
    assert slow.passes == passes, "steps go on after the answer was cancelled"
    slow.pause = 0.0


@pytest.mark.parametrize("share", [False, True])
def test_a_prompt_is_read_anew_for_another_key(start: Start, keys: str, share: bool) -> None:
    """Or its time would tell that somebody asked the same."""
    server = start(api_key_file=keys, share_prefixes=share)

    def reused(key: str) -> int:
        body = {"prompt": SHARED, "max_tokens": 3, "tokenswift": {"ignore_eos": True}}
        before = server.answers.scheduler.figures().reused
        assert server.post("/v1/completions", body, headers=shown(key)).status_code == 200
        return server.answers.scheduler.figures().reused - before

    assert reused(KEY) == 0
    assert (reused(OTHER) > 0) == share
    assert reused(KEY) > 0
    assert reused(OTHER) > 0


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="addresses of one kind alone")
def test_all_addresses_of_either_kind() -> None:
    with held(Settings(host="::", port=0, api_key=KEY)) as taken:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, taken.getsockname()[1]), 5).close()


def test_health_while_the_model_is_loaded(start: Start) -> None:
    """At the address that the server will have: it takes over what nobody has answered."""
    with held(Settings(port=0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with loading(taken, Settings()):
            health = httpx.get(f"{url}/health")
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            reply = httpx.post(f"{url}/v1/completions", json={"prompt": "hello" * 100_000})
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["message"].startswith("the model is being loaded; valid: ")
            with socket.create_connection(
                taken.getsockname()
            ):  # asks nothing, and holds nothing up
                assert httpx.head(f"{url}/").status_code == 503
        with ThreadPoolExecutor() as pool:
            early = pool.submit(httpx.get, f"{url}/health", timeout=60)
            server = start(taken=taken)
            assert server.url == url
            assert early.result().json() == {"status": "ok"}
            server.close()
