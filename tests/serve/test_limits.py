"""What is too long, or comes from elsewhere, is refused before anything is done for it."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running, Start
from tokenswift import LLM
from tokenswift.serve.schemas import CHARACTERS, KINDS

HELLO: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}
PATHS = {"chat": "chat/completions", "completion": "completions", "response": "responses"}
MANY = 50_000
SITE = "https://chat.example"


def raw(server: Running, *lines: str, method: str = "GET", path: str = "/health") -> tuple[int, str]:
    """A request with headers that no client sends; its status and body."""
    host, port = server.url.removeprefix("http://").split(":")
    text = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "connection: close", "", ""])
    with socket.create_connection((host, int(port)), 30) as sent:
        sent.sendall(text.encode("latin-1"))
        data = b""
        while part := sent.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


HOSTS = [
    "[",
    "127.0.0.1:x",
    "x@127.0.0.1",
    "a b",
    "%31",
    "127.0.0.1:1:2",
]


@pytest.mark.parametrize("host", HOSTS, ids=ascii)
def test_hosts_that_are_none(server: Running, host: str) -> None:
    status, body = raw(server, f"host: {host}")
    assert status in (400, 403), body
    if body.startswith("{"):  # h11 refuses some of them before us
        assert "Host header" in json.loads(body)["error"]["message"] and "\n" not in body


def test_origins_from_elsewhere(server: Running) -> None:
    host = server.url.removeprefix("http://")
    wrong = [
        "http://[",
        "http://[::1",
        "null",
        "",
        "x",
        "http://",
        f"https://{host}",
        f"ftp://{host}",
        host,
        f"chrome-extension://{host}",
        f"{server.url}/",
        f"http://x@{host}",
        "http://127.0.0.1",
        SITE,
    ]
    for origin in wrong:
        found = server.post("/v1/completions", HELLO, headers={"origin": origin})
        assert found.status_code == 403 and "Origin header" in found.json()["error"]["message"], origin
        assert raw(server, f"host: {host}", f"origin: {origin}")[0] == 403, origin
    assert server.post("/v1/completions", HELLO, headers={"origin": server.url}).status_code == 200


def test_other_sites_that_may_ask(start: Start) -> None:
    server = start(cors=(SITE, "app://obsidian.md/"), api_key="a-key-of-a-client")
    asked = {"origin": SITE, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
    first = httpx.options(f"{server.url}/v1/completions", headers=asked)
    assert first.status_code == 200 and first.headers["access-control-allow-origin"] == SITE
    assert "x-stainless-os" in first.headers["access-control-allow-headers"]
    key = {"authorization": "Bearer a-key-of-a-client"}
    found = server.post("/v1/completions", HELLO, headers={"origin": SITE, **key})
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == SITE
    refused = server.post("/v1/completions", HELLO, headers={"origin": SITE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == SITE
    for origin in ("https://other.example", f"{SITE}.evil.example", "http://chat.example"):
        other = httpx.options(f"{server.url}/v1/completions", headers={**asked, "origin": origin})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        assert server.post("/v1/completions", HELLO, headers={"origin": origin, **key}).status_code == 403


def test_a_long_prompt_is_not_encoded(start: Start, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(prompt: Any) -> list[int]:
        raise AssertionError("it was encoded")

    server = start(max_prompt=20)
    monkeypatch.setattr(llm, "encode", encode)
    text = "a" * (20 * CHARACTERS + 1)
    said = f"the prompt is {len(text)} characters; valid: up to {len(text) - 1}, for 20 tokens"
    half = {"role": "user", "content": text[: len(text) // 2 + 1]}
    for path, body, field in (
        ("completions", {"prompt": text}, "prompt"),
        ("completions", {"prompt": ["a", text]}, "prompt"),
        ("responses", {"input": text}, "input"),
        ("responses", {"input": "a", "instructions": text}, "input"),
        ("chat/completions", {"messages": [half, half]}, "messages"),
    ):
        found = server.post(f"/v1/{path}", body)
        error = found.json()["error"]
        assert found.status_code == 400 and error["param"] == field, error
        assert "characters; valid: up to 640, for 20 tokens" in error["message"]
    assert server.post("/v1/completions", {"prompt": text}).json()["error"]["message"] == said
    ids = server.post("/v1/completions", {"prompt": [1] * 21}).json()["error"]
    assert ids["message"] == "the prompt is 21 tokens; valid: up to 20"


LONG: dict[str, tuple[str, Any, str]] = {
    "stop": ("completion", {"prompt": "x", "stop": ["x"] * MANY}, "stop has 50,000 entries; valid: up to 16"),
    "a long stop": ("completion", {"prompt": "x", "stop": "x" * 257}, "stop[0] is 'xxx"),
    "messages": ("chat", {"messages": [HELLO] * MANY}, "messages has 50,000 entries; valid: up to 4,096"),
    "parts": (
        "chat",
        {"messages": [{"role": "user", "content": [0] * MANY}]},
        "messages[0].content has 50,000",
    ),
    "input": ("response", {"input": [0] * MANY}, "input has 50,000 entries"),
    "metadata": (
        "response",
        {"input": "x", "metadata": dict.fromkeys(map(str, range(MANY)), 0)},
        "metadata has 50,000 entries; valid: up to 16",
    ),
    "ids and text": (
        "completion",
        {"prompt": [*[0] * MANY, "x"]},
        "prompt is [0, 0, 0, 0, 0, 0, 0, 0]; valid: text",
    ),
    "widths": (
        "completion",
        {"prompt": "x", "tokenswift": {"strategy_options": {"tree": [1] * MANY}}},
        "tokenswift.strategy_options.tree has 50,000 entries; valid: up to 4,096",
    ),
    "biases": (
        "response",
        {"input": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
        "logit_bias has 50,000 entries; valid: up to 16,384",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_long_lists(server: Running, name: str) -> None:
    """Their entries are not looked at one by one: each would be an error, and megabytes take minutes."""
    kind, body, message = LONG[name]
    with pytest.raises(ValueError) as caught:
        KINDS[kind][0].model_validate(body)
    assert caught.value.error_count() == 1  # type: ignore[attr-defined]
    found = server.post(f"/v1/{PATHS[kind]}", body)
    error = found.json()["error"]
    assert found.status_code == 400 and error["message"].startswith(message), error
    assert error["param"] in (*body, None)


def test_fields_that_nobody_knows(server: Running) -> None:
    """Any number of them is left out; the header names some."""
    found = server.post("/v1/completions", {**HELLO, **dict.fromkeys(map(str, range(MANY)), [1])})
    assert found.status_code == 200 and found.headers["x-left-out"] == ", ".join(map(str, range(20)))


def own(**more: Any) -> dict[str, Any]:
    return {**HELLO, "tokenswift": more}


DEEP: Any = json.loads("[" * 500 + "]" * 500)
WORDS: list[tuple[dict[str, Any], str, str]] = [
    (
        {**HELLO, "max_tokens": 1020},
        "max_tokens",
        "max_tokens is 1020, after a prompt of 6 tokens; valid: up to 1,018",
    ),
    ({"prompt": [1] * 1024}, "prompt", "the prompt is 1,024 tokens; valid: up to 1,023"),
    (own(strategy="best"), "tokenswift", "tokenswift.strategy is 'best'; valid: auto, "),
    (
        own(strategy="magicdec", strategy_options={"gamma": 4000}),
        "tokenswift",
        "tokenswift.strategy_options.gamma is 4000; valid: an integer from 1 to 32",
    ),
    (
        own(strategy="triforce", strategy_options={"gamma": 32, "inner_gamma": 32}),
        "tokenswift",
        "tokenswift.strategy_options.gamma times inner_gamma is 1,024; valid here: up to 64",
    ),
    (
        own(strategy="tokenswift", strategy_options={"tree": [1, 300]}),
        "tokenswift",
        "tokenswift.strategy_options asks for a tree of 382 nodes; valid here: up to 256",
    ),
    (own(strategy="magicdec", strategy_options={"gamma": DEEP}), "tokenswift", ""),
    (own(strategy="tokenswift", strategy_options={"tree": DEEP}), "tokenswift", ""),
    ({**HELLO, "suffix": "b"}, "suffix", "suffix is not supported; valid: leave it out"),
    (
        {**HELLO, "previous_response_id": "b"},
        "previous_response_id",
        "previous_response_id is not supported",
    ),
]


@pytest.mark.parametrize(("body", "field", "message"), WORDS, ids=lambda part: str(part)[:50])
def test_errors_name_what_a_client_can_set(
    server: Running, body: dict[str, Any], field: str, message: str
) -> None:
    found = server.post("/v1/completions", body)
    error = found.json()["error"]
    assert 400 <= found.status_code < 500 and error["param"] == field, error
    assert error["message"].startswith(message) and len(error["message"]) < 400


PLACES: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"messages": "x"}, "messages", "messages is 'x'; valid: a list"),
    (
        "chat",
        {"messages": [{"role": "user"}]},
        "messages",
        "messages[0].content is missing; valid: text",
    ),
    (
        "response",
        {"input": [{"role": "judge", "content": "x"}]},
        "input",
        "input[0].role is 'judge'; valid: 'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    (
        "response",
        {"input": "x", "prompt": {"id": "y"}},
        "prompt",
        "prompt is not supported; valid: leave it out",
    ),
    ("completion", {**HELLO, "max_tokens": "3"}, "max_tokens", "max_tokens is '3'; valid: an integer"),
    (
        "completion",
        {**HELLO, "tokenswift": {"x": 3}},
        "tokenswift",
        "tokenswift.x is not a setting of this server",
    ),
]


@pytest.mark.parametrize(("kind", "body", "field", "message"), PLACES, ids=lambda part: str(part)[:50])
def test_errors_name_the_place(
    server: Running, kind: str, body: dict[str, Any], field: str, message: str
) -> None:
    found = server.post(f"/v1/{PATHS[kind]}", body)
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["message"]) == (400, field, message)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000])
def test_bodies_that_python_cannot_read(server: Running, value: str) -> None:
    body, kind = f'{{"prompt": "x", "seed": {value}}}', {"content-type": "application/json"}
    found = httpx.post(f"{server.url}/v1/completions", content=body, headers=kind)
    wanted = "the body cannot be read; valid: a JSON object of few levels"
    assert (found.status_code, found.json()["error"]["message"]) == (400, wanted)


def test_errors_of_the_memory(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the engine's names, nor advice for whoever starts the server."""
    from tokenswift.memory import Memory

    monkeypatch.setattr(llm.target.backend, "memory", lambda: Memory(1000, 1 << 40))
    for path, body, field in (
        ("completions", {"prompt": "hello"}, "max_tokens"),
        ("responses", {"input": "hello"}, "max_output_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, "max_tokens"),
    ):
        for length in (5, 900):
            name = "max_completion_tokens" if path.startswith("chat") else field
            error = server.post(f"/v1/{path}", {**body, name: length}).json()["error"]
            assert "bytes of memory" in error["message"] and "max_new_tokens" not in error["message"]
            assert "dtype" not in error["message"]
