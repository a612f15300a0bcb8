"""What is too long, comes from elsewhere, or is wrong in any way is refused, in one line."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running, Start, until
from tokenswift import LLM
from tokenswift.serve.base import MOST_CHARACTERS_PER_TOKEN
from tokenswift.serve.schemas import Chat, Completion, Responses
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError

HELLO: dict[str, object] = {"prompt": "hello", "max_tokens": 4}
MANY = 50_000
SITE = "https://chat.example"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1:x"])
def test_hosts_that_are_none(server: Running, host: str) -> None:
    reply = server.get("/health", headers={"host": host})
    assert reply.status_code == 403
    assert "Host header" in reply.json()["error"]["message"]


def test_origins_from_elsewhere(server: Running) -> None:
    host = server.url.removeprefix("http://")
    for origin in ("http://[", "null", "", f"https://{host}", host, f"{server.url}/", SITE):
        reply = server.post("/v1/completions", HELLO, headers={"origin": origin})
        assert reply.status_code == 403, origin
        assert "Origin header" in reply.json()["error"]["message"], origin
    assert server.post("/v1/completions", HELLO, headers={"origin": server.url}).status_code == 200


def test_other_sites_that_may_ask(start: Start) -> None:
    server = start(cors=(SITE, "app://obsidian.md/"), api_key="a-key-of-a-client")
    preflight = {"origin": SITE, "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
    first = httpx.options(f"{server.url}/v1/completions", headers=preflight)
    assert first.status_code == 200
    assert first.headers["access-control-allow-origin"] == SITE
    assert "x-stainless-os" in first.headers["access-control-allow-headers"]
    key = {"authorization": "Bearer a-key-of-a-client"}
    reply = server.post("/v1/completions", HELLO, headers={"origin": SITE, **key})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == SITE
    refused = server.post("/v1/completions", HELLO, headers={"origin": SITE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == SITE
    for origin in ("https://other.example", f"{SITE}.evil.example", "http://chat.example"):
        other = httpx.options(
            f"{server.url}/v1/completions", headers={**preflight, "origin": origin}
        )
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        assert (
            server.post("/v1/completions", HELLO, headers={"origin": origin, **key}).status_code
            == 403
        )


def test_a_long_prompt_is_not_encoded(
    start: Start, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(prompt: object) -> list[int]:
        raise AssertionError("it was encoded")

    server = start(max_prompt=20)
    monkeypatch.setattr(llm, "encode", encode)
    text = "a" * (20 * MOST_CHARACTERS_PER_TOKEN)
    half = {"role": "user", "content": text[len(text) // 2 :]}
    for path, body, field in (
        ("completions", {"prompt": text + "a"}, "prompt"),
        ("responses", {"input": "a", "instructions": text}, "input"),
        ("chat/completions", {"messages": [half, half]}, "messages"),
    ):
        reply = server.post(f"/v1/{path}", body)
        error = reply.json()["error"]
        assert reply.status_code == 400, error
        assert error["param"] == field, error
        assert "characters; valid: up to 640, for 20 tokens" in error["message"]
    monkeypatch.undo()
    ids = server.post("/v1/completions", {"prompt": [1] * 21}).json()["error"]
    assert ids["message"] == "the prompt is 21 tokens; valid: up to 20"


LONG: list[tuple[str, dict[str, object], str]] = [
    ("chat/completions", {"messages": [{}] * MANY}, "at most 4096 items"),
    ("responses", {"input": "x", "metadata": {str(i): 0 for i in range(99)}}, "at most 32 items"),
    ("completions", {"prompt": [*[0] * MANY, "x"]}, "prompt is [0, 0"),
    ("completions", {"prompt": "x", "stop": ["x"] * MANY}, "stop is "),
]
KINDS = {"chat/completions": Chat, "completions": Completion, "responses": Responses}


@pytest.mark.parametrize(("path", "body", "message"), LONG, ids=lambda part: str(part)[:50])
def test_long_lists(server: Running, path: str, body: dict[str, object], message: str) -> None:
    """Their entries are not all looked at: each would be an error, and megabytes take minutes."""
    with pytest.raises(ValueError) as caught:
        KINDS[path].model_validate(body)
    assert caught.value.error_count() <= 4  # type: ignore[attr-defined]
    reply = server.post(f"/v1/{path}", body)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert message in error["message"], error
    assert error["param"] in body, error


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "any"}}}}}
LEAST: dict[str, dict[str, object]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": HELLO,
    "responses": {"input": "x"},
}
#: what is wrong in a request, and the beginning of its refusal
WORDS: dict[str, list[tuple[dict[str, object], str]]] = {
    "completions": [
        ({"max_tokens": 1020}, "max_tokens is 1020; valid: an integer from 1 to 1,018"),
        ({"max_tokens": "x"}, "max_tokens is 'x'; valid: a valid integer"),
        ({"prompt": [{}, "y"]}, "prompt is [{}, 'y']; valid: a valid string"),
        ({"n": 200}, "n is 200; valid: an integer from 1 to 128"),
        ({"stop": "x" * 1025}, "stop is "),
        ({"prompt_logprobs": 3}, "prompt_logprobs is not supported; valid: leave it out"),
        ({"tokenswift": {"x": 3}}, "tokenswift is 'x'; valid: strategy, "),
        ({"tokenswift": {"strategy": "best"}}, "strategy is 'best'; valid: auto, "),
        ({"temperature": -1}, "temperature is -1.0; valid: "),
    ],
    "chat/completions": [
        (
            {"messages": [{"content": "x"}]},
            "messages[0].role is missing; valid: system, developer, user, ",
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs is not supported; valid: leave it out",
        ),
        (
            {"tokenswift": {"grammar": "a"}},
            "grammar is 'a'; valid: a Grammar, or an object such as ",
        ),
        ({"response_format": SCHEMA}, "the JSON schema cannot be compiled (Invalid type: any)"),
        ({"tool_choice": "required"}, "tool_choice is 'required'; valid: none, auto, or "),
        ({"logit_bias": {"-1": 1}}, "logit_bias is {'-1': 1}; valid: up to 16,384 token ids"),
    ],
    "responses": [
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role is 'judge'; valid: "),
        ({"input": [{"type": "image"}]}, "input holds no message; valid: text, "),
        ({"prompt": {"id": "y"}}, "prompt is not supported; valid: leave it out"),
    ],
}


@pytest.mark.parametrize("path", WORDS)
def test_errors_name_the_value(server: Running, path: str) -> None:
    for body, message in WORDS[path]:
        reply = server.post(f"/v1/{path}", {**LEAST[path], **body})
        error = reply.json()["error"]
        assert reply.status_code == 400, error
        assert error["message"].startswith(message), error
        assert len(error["message"]) < 400


# ---- what is wrong in any way is refused with 4xx and one line; the server never fails on one ----

DEEP = "[" * 5000 + "]" * 5000
HELLO_MESSAGES = '"messages": [{"role": "user", "content": "hello"}]'
#: bodies, as they are sent
BROKEN: dict[str, list[str]] = {
    "completions": [
        "",
        "{",
        DEEP,
        '{"prompt":' + DEEP + "}",
        '{"prompt": [-1]}',
        '{"prompt": [99999999999999999999]}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "x", "n": 0}',
        '{"prompt": "x", "seed": 18446744073709551616}',
        '{"prompt": "x", "tokenswift": {"\\ud800": 1}}',
        '{"prompt": "x", "tokenswift": {"run_dir": "/tmp/kept"}}',
    ],
    "chat/completions": [
        "{}",
        '{"messages": [{"role": "tool", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}',
        "{" + HELLO_MESSAGES + ', "tools": [{"type": "function", "function": {"name": "a b"}}]}',
        "{" + HELLO_MESSAGES + ', "tools": [{"type": "function", "name": "\\ud800"}]}',
        "{" + HELLO_MESSAGES + ', "tools": ' + DEEP[4900:-4900] + "}",
    ],
    "responses": [
        '{"input": []}',
        '{"input": "x", "metadata": {"a": "\\ud800"}}',
        '{"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}',
        '{"input": "x", "previous_response_id": "../answers"}',
    ],
}
CASES = [(path, body) for path, bodies in BROKEN.items() for body in bodies]


@pytest.mark.parametrize(("path", "body"), CASES, ids=lambda value: value[:60])
def test_bodies(server: Running, path: str, body: str) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(
        f"{server.url}/v1/{path}", content=body.encode(), headers=headers, timeout=60
    )
    assert 400 <= reply.status_code < 500, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


PATHS = [
    ("GET", "/v1/responses/resp_" + "0" * 32, 404, "there is no response "),
    (
        "GET",
        "/v1/responses/resp_1?stream=true&starting_after=x",
        400,
        "starting_after is 'x'; valid: ",
    ),
    ("GET", "/v1/models/none", 404, "the model 'none' is not served; valid: chatty"),
    ("GET", "/%ff%00", 404, "there is no GET "),
    (
        "POST",
        "/chat/completions",
        404,
        "there is no POST '/chat/completions'; valid: /v1/chat/completions, ",
    ),
]


@pytest.mark.parametrize(("method", "path", "status", "message"), PATHS)
def test_paths(server: Running, method: str, path: str, status: int, message: str) -> None:
    reply = httpx.request(method, f"{server.url}{path}", timeout=60)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"].startswith(message), reply.text


def test_the_description(server: Running) -> None:
    """In the form that generators and clients read."""
    described = server.get("/openapi.json").json()["paths"]
    for path, field in (
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
    ):
        content = described[path]["post"]["requestBody"]["content"]
        assert field in content["application/json"]["schema"]["properties"]


# ---- names of this machine, and what the log says of strangers -----------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("host.docker.internal", 200),
        ("Host.Docker.Internal:8000", 200),
        ("chat.example", 200),
        ("[fd00::1]:8000", 200),
        ("docker.internal", 403),
        ("localhost", 200),
    ],
)
def test_names_that_a_proxy_or_a_container_has(start: Start, host: str, status: int) -> None:
    names = ("host.docker.internal", "fd00::1")
    server = start(cors=(f"{SITE}:8443",), allowed_host=names)
    assert server.get("/health", headers={"host": host}).status_code == status


def test_an_unknown_name_is_told_the_option(server: Running) -> None:
    reply = server.get("/health", headers={"host": "host.docker.internal"})
    assert reply.json()["error"]["message"] == (
        "the Host header names another machine; "
        "valid: localhost, 127.0.0.1, or a name given by --allowed-host NAME"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_host", "host:80"),
        ("allowed_host", "a b"),
        ("allowed_host", ""),
        ("cors", "http://["),
        ("cors", "https://*.example"),
        ("cors", "chat.example"),
    ],
)
def test_names_and_sites_that_are_none(field: str, value: str) -> None:
    names: Any = {field: (value,)}
    with pytest.raises(InputError, match=f"^{field} is {re.escape(repr(value))}; valid: "):
        Settings(**names)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", {"x-forwarded-for": "1.2.3.4\x1b[2J\x9b31m"}),
        ("/v1/%1b[2J%0anew line", {}),
        ("/v1/models/%1b]0;title%07", {}),
        ("/v1/responses/%c2%9b31m", {}),
    ],
)
def test_no_control_characters_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture, path: str, headers: dict[str, str]
) -> None:
    caplog.set_level(logging.INFO, "tokenswift")
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    httpx.get(f"{server.url}{path}", headers=raw, timeout=60)

    def lines() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "tokenswift"]

    assert until(lambda: bool(lines()), 10)  # the line comes when the answer is out
    assert all(line.isascii() and line.isprintable() for line in lines())
