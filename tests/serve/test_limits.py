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
        "prompt[50000] is 'x'; valid: an integer",
    ),
    "parts of messages": (
        "chat",
        {"messages": [{"role": "user", "content": [0] * 1000}] * 1000},
        "messages[0].content[0] is 0; valid: an object",
    ),
    "biases": (
        "response",
        {"input": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
        "logit_bias has 50,000 entries; valid: up to 16,384",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_long_lists(server: Running, name: str) -> None:
    """Their entries are not all looked at: each would be an error, and megabytes take minutes."""
    kind, body, message = LONG[name]
    with pytest.raises(ValueError) as caught:
        KINDS[kind][0].model_validate(body)
    assert caught.value.error_count() <= 4  # type: ignore[attr-defined]
    found = server.post(f"/v1/{PATHS[kind]}", body)
    error = found.json()["error"]
    assert found.status_code == 400 and error["message"].startswith(message), error
    assert error["param"] in (*body, None)


def test_fields_that_nobody_knows(server: Running) -> None:
    """Any number of them is left out; the header names some."""
    found = server.post("/v1/completions", {**HELLO, **dict.fromkeys(map(str, range(MANY)), [1])})
    assert found.status_code == 200 and found.headers["x-left-out"] == ", ".join(map(str, range(20)))
    found = server.post("/v1/completions", {**HELLO, " ä": 1, "b\r\n ": 1})  # no header may end in a space
    assert found.status_code == 200 and found.headers["x-left-out"] == r"\xe4, b\r\n"


def test_fields_of_another_endpoint(server: Running) -> None:
    """They are left out, as the header says, whatever they hold."""
    free = {**HELLO, "seed": 3}
    others = {"background": True, "tools": [5], "chat_template_kwargs": 5, "reasoning": 5, "greedy": True}
    wanted = server.post("/v1/completions", free).json()
    found = server.post("/v1/completions", {**free, **others})
    assert found.status_code == 200 and found.headers["x-left-out"] == ", ".join(others)
    assert found.json()["object"] == "text_completion" and found.json()["choices"] == wanted["choices"]
    found = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 3, "n": 5})
    assert found.json()["usage"]["output_tokens"] <= 3 and found.headers["x-left-out"] == "n"


def own(**more: Any) -> dict[str, Any]:
    return {"tokenswift": more}


DEEP: Any = json.loads("[" * 500 + "]" * 500)
TREE = {"strategy": "tokenswift", "strategy_options": {"tree": [1, 300]}}
LONG_TREE = {"strategy": "tokenswift", "strategy_options": {"tree": [1] * MANY}}
MAGIC, TRIFORCE = {"strategy": "magicdec"}, {"strategy": "triforce"}
LACKS = "valid: leave it out"
#: kind and body of a request, and the beginning of its refusal, whose first word is the field
WORDS: list[tuple[str, dict[str, Any], str]] = [
    (
        "completion",
        {"max_tokens": 1020},
        "max_tokens is 1020, after a prompt of 6 tokens; valid: up to 1,",
    ),
    ("completion", {"max_tokens": "3"}, "max_tokens is '3'; valid: an integer"),
    ("completion", {"prompt": {"a": 1}}, "prompt is {'a': 1}; valid: text, or a list"),
    ("completion", {"suffix": "b"}, f"suffix is not supported; {LACKS}"),
    ("completion", {"previous_response_id": "b"}, f"previous_response_id is not supported; {LACKS}"),
    ("completion", own(x=3), "tokenswift.x is not a setting of this server"),
    ("completion", own(strategy="best"), "tokenswift.strategy is 'best'; valid: auto, "),
    ("completion", own(eta_cutoff=-1), "tokenswift.eta_cutoff is -1"),
    (
        "completion",
        own(**MAGIC, strategy_options={"x": 1}),
        "tokenswift.strategy_options.x is not an option of ",
    ),
    (
        "completion",
        own(**MAGIC, strategy_options={"gamma": 4000}),
        "tokenswift.strategy_options.gamma is 4000; valid: an integer from 1 to 32",
    ),
    (
        "completion",
        own(**MAGIC, strategy_options={"gamma": DEEP}),
        "tokenswift.strategy_options.gamma is ([",
    ),
    (
        "completion",
        own(**TRIFORCE, strategy_options={"gamma": 32, "inner_gamma": 32}),
        "tokenswift.strategy_options.gamma times inner_gamma is 1,024; valid here: up to 64",
    ),
    (
        "completion",
        own(**TREE),
        "tokenswift.strategy_options asks for a tree of 382 nodes; valid here: up to 256",
    ),
    ("completion", own(**LONG_TREE), "tokenswift.strategy_options.tree is '1,1,"),
    ("chat", {"messages": "x"}, "messages is 'x'; valid: a list"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content is missing; valid: text"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role is missing; valid: system, developer, "),
    ("chat", {"guided_json": 5}, "guided_json is 5; valid: text, or an object"),
    ("chat", {"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0] is 5; valid: text"),
    (
        "chat",
        {"guided_json": "{}", "guided_regex": "a"},
        "guided_json and guided_regex are given; valid: one ",
    ),
    (
        "response",
        {"input": [{"role": "judge", "content": "x"}]},
        "input[0].role is 'judge'; valid: 'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    ("response", {"prompt": {"id": "y"}}, f"prompt is not supported; {LACKS}"),
]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completion": HELLO,
    "response": {"input": "x"},
}


@pytest.mark.parametrize(("kind", "body", "message"), WORDS, ids=lambda part: str(part)[:50])
def test_errors_name_what_a_client_can_set(
    server: Running, kind: str, body: dict[str, Any], message: str
) -> None:
    found = server.post(f"/v1/{PATHS[kind]}", {**BODIES[kind], **body})
    error = found.json()["error"]
    assert found.status_code == 400 and error["message"].startswith(message), error
    assert error["param"] in message.partition(";")[0] and error["param"] in {**BODIES[kind], **body}
    assert len(error["message"]) < 400


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
