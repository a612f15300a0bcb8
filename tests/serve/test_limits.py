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


HOSTS = ["evil.example", "127.0.0.1.evil.example", "[", "127.0.0.1:x", "x@127.0.0.1", "%31"]


@pytest.mark.parametrize("host", HOSTS, ids=ascii)
def test_hosts_that_are_none(server: Running, host: str) -> None:
    status, body = raw(server, f"host: {host}")
    assert status in (400, 403), body
    if body.startswith("{"):  # h11 refuses some of them before us
        assert "Host header" in json.loads(body)["error"]["message"] and "\n" not in body


def test_origins_from_elsewhere(server: Running) -> None:
    host = server.url.removeprefix("http://")
    wrong = ["http://[", "null", "", "http://", f"https://{host}", host, f"{server.url}/", SITE]
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
    text = "a" * (20 * CHARACTERS)
    half = {"role": "user", "content": text[len(text) // 2 :]}
    for path, body, field in (
        ("completions", {"prompt": text + "a"}, "prompt"),
        ("responses", {"input": "a", "instructions": text}, "input"),
        ("chat/completions", {"messages": [half, half]}, "messages"),
    ):
        found = server.post(f"/v1/{path}", body)
        error = found.json()["error"]
        assert found.status_code == 400 and error["param"] == field, error
        assert "characters; valid: up to 640, for 20 tokens" in error["message"]
    monkeypatch.undo()
    ids = server.post("/v1/completions", {"prompt": [1] * 21}).json()["error"]
    assert ids["message"] == "the prompt is 21 tokens; valid: up to 20"


LONG: dict[str, tuple[str, Any, str]] = {
    "messages": ("chat", {"messages": [{}] * MANY}, "at most 4096 items"),
    "metadata": (
        "response",
        {"input": "x", "metadata": {str(i): 0 for i in range(99)}},
        "at most 32 items",
    ),
    "ids and text": ("completion", {"prompt": [*[0] * MANY, "x"]}, "prompt[50000] is 'x'; valid: integer"),
    "stop": ("completion", {"prompt": "x", "stop": ["x"] * MANY}, "at most 1024 items"),
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
    assert found.status_code == 400 and message in error["message"], error
    assert error["param"] in body


def test_fields_that_nobody_knows(server: Running) -> None:
    """Any number of them is left out; the header names some."""
    found = server.post("/v1/completions", {**HELLO, **dict.fromkeys(map(str, range(MANY)), [1])})
    assert found.status_code == 200 and found.headers["x-left-out"] == ", ".join(map(str, range(20)))
    found = server.post("/v1/completions", {**HELLO, " ä": 1, "b\r\n ": 1})  # no header may end in a space
    assert found.status_code == 200 and found.headers["x-left-out"] == r"\xe4, b\r\n"


WRONG = {"type": "json_object", "schema": {"properties": {"a": {"type": "any"}}}}
LACKS = "valid: leave it out"
#: kind and body of a request, and the beginning of its refusal, whose first word is the field
WORDS: list[tuple[str, dict[str, Any], str]] = [
    (
        "completion",
        {"max_tokens": 1020},
        "max_tokens is 1020; valid: an integer from 1 to 1,018",
    ),
    ("completion", {"max_tokens": "x"}, "max_tokens is 'x'; valid: integer"),
    ("completion", {"prompt": {"a": 1}}, "prompt is {'a': 1}; valid: string, or list"),
    ("completion", {"prompt": ["x"] * 9}, "n is 1, for 9 prompts; valid: 1 to 8 in all"),
    ("completion", {"stop": "x" * 1025}, "stop is "),
    ("completion", {"suffix": "b"}, f"suffix is not supported; {LACKS}"),
    (
        "completion",
        {"tokenswift": {"x": 3}},
        "tokenswift.x is not a setting of this server; valid: strategy, ",
    ),
    ("completion", {"tokenswift": {"strategy": "best"}}, "tokenswift.strategy is 'best'; valid: auto, "),
    ("completion", {"logprobs": 21}, "logprobs is 21; valid: an integer from 0 to 20"),
    ("chat", {"messages": "x"}, "messages is 'x'; valid: list"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0] is {'content': 'x'}; valid: a message such as "),
    ("chat", {"structured_outputs": {"choice": [5]}}, "the choice is [5]; valid: a JSON list of texts"),
    (
        "chat",
        {"structured_outputs": {"structural_tag": {}}},
        "structured_outputs holds 'structural_tag'; valid: ",
    ),
    ("chat", {"tool_choice": "required"}, "tool_choice is 'required'; valid: none, auto, or "),
    ("response", {"input": [{"role": "judge", "content": "x"}]}, "the model's chat template refuses"),
    ("response", {"input": [{"type": "image"}]}, "input[0].type is 'image'; valid: message, "),
    (
        "chat",
        {"logit_bias": {"-1": 1}},
        "logit_bias is {'-1': 1}; valid: up to 16,384 token ids, each once",
    ),
    ("chat", {"response_format": WRONG}, "the JSON schema cannot be compiled (Invalid type: any); valid: a "),
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
    assert error["param"] in {**BODIES[kind], **body}
    assert len(error["message"]) < 400
