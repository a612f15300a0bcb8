"""What is too long, comes from elsewhere, or is wrong in any way is refused, in one line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running, Start
from tokenswift import LLM
from tokenswift.serve.schemas import CHARACTERS, Chat, Completion, Responses

HELLO: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}
MANY = 50_000
SITE = "https://chat.example"


def raw(server: Running, *lines: str) -> tuple[int, str]:
    """A request with headers that no client sends; its status and body."""
    host, port = server.url.removeprefix("http://").split(":")
    text = "\r\n".join(["GET /health HTTP/1.1", *lines, "connection: close", "", ""])
    with socket.create_connection((host, int(port)), 30) as sent:
        sent.sendall(text.encode("latin-1"))
        data = b""
        while part := sent.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "x@127.0.0.1", "%31"])
def test_hosts_that_are_none(server: Running, host: str) -> None:
    status, body = raw(server, f"host: {host}")
    assert status in (400, 403), body
    if body.startswith("{"):  # h11 refuses some of them before us
        assert "Host header" in json.loads(body)["error"]["message"] and "\n" not in body


def test_origins_from_elsewhere(server: Running) -> None:
    host = server.url.removeprefix("http://")
    for origin in ("http://[", "null", "", f"https://{host}", host, f"{server.url}/", SITE):
        found = server.post("/v1/completions", HELLO, headers={"origin": origin})
        assert found.status_code == 403 and "Origin header" in found.json()["error"]["message"], origin
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


LONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": [{}] * MANY}, "at most 4096 items"),
    ("responses", {"input": "x", "metadata": {str(i): 0 for i in range(99)}}, "at most 32 items"),
    ("completions", {"prompt": [*[0] * MANY, "x"]}, "prompt is [0, 0"),
    ("completions", {"prompt": "x", "stop": ["x"] * MANY}, "stop is "),
]
KINDS = {"chat/completions": Chat, "completions": Completion, "responses": Responses}


@pytest.mark.parametrize(("path", "body", "message"), LONG, ids=lambda part: str(part)[:50])
def test_long_lists(server: Running, path: str, body: dict[str, Any], message: str) -> None:
    """Their entries are not all looked at: each would be an error, and megabytes take minutes."""
    with pytest.raises(ValueError) as caught:
        KINDS[path].model_validate(body)
    assert caught.value.error_count() <= 4  # type: ignore[attr-defined]
    found = server.post(f"/v1/{path}", body)
    error = found.json()["error"]
    assert found.status_code == 400 and message in error["message"] and error["param"] in body, error


def test_fields_that_nobody_knows(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Any number of them is left out; the log names some."""
    caplog.set_level("INFO", "tokenswift")
    found = server.post("/v1/completions", {**HELLO, **dict.fromkeys(map(str, range(MANY)), [1])})
    assert found.status_code == 200 and "completions: " + ", ".join(map(str, range(20))) in caplog.text


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "any"}}}}}
#: path and body of a request, and the beginning of its refusal
WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"max_tokens": 1020}, "max_tokens is 1020; valid: an integer from 1 to 1,018"),
    ("completions", {"max_tokens": "x"}, "max_tokens is 'x'; valid: a valid integer"),
    ("completions", {"prompt": {"a": 1}}, "prompt is {'a': 1}; valid: a valid string"),
    ("completions", {"n": 2}, "n is 2; valid: 1, in a request for each text"),
    ("completions", {"prompt": ["x", "y"]}, "prompt is ['x', 'y']; valid: a valid string"),
    ("completions", {"stop": "x" * 1025}, "stop is "),
    ("completions", {"suffix": "b"}, "suffix is not supported; valid: leave it out"),
    ("completions", {"logprobs": 3}, "logprobs is not supported; valid: leave it out"),
    (
        "completions",
        {"tokenswift": {"x": 3}},
        "tokenswift.x is not a setting of this server; valid: ",
    ),
    ("completions", {"tokenswift": {"strategy": "best"}}, "strategy is 'best'; valid: auto, "),
    ("chat/completions", {"messages": "x"}, "messages is 'x'; valid: a valid list"),
    (
        "chat/completions",
        {"messages": [{"content": "x"}]},
        "prompt[0] is {'content': 'x'}; valid: a message ",
    ),
    (
        "chat/completions",
        {"structured_outputs": {"choice": [5]}},
        "the choice is [5]; valid: a JSON list of ",
    ),
    ("chat/completions", {"structured_outputs": {"tag": 1}}, "structured_outputs holds 'tag'; valid: json, "),
    ("chat/completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "2 grammars are given"),
    (
        "chat/completions",
        {"response_format": SCHEMA},
        "the JSON schema cannot be compiled (Invalid",
    ),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice is 'required'; valid: none, auto, or "),
    ("chat/completions", {"logit_bias": {"-1": 1}}, "logit_bias is {'-1': 1}; valid: up to 16,384 token ids"),
    ("responses", {"input": [{"role": "judge", "content": "x"}]}, "the model's chat template refuses"),
    ("responses", {"input": [{"type": "image"}]}, "input[0].type is 'image'; valid: message, "),
    ("responses", {"prompt": {"id": "y"}}, "prompt is not supported; valid: leave it out"),
]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": HELLO,
    "responses": {"input": "x"},
}


@pytest.mark.parametrize(("path", "body", "message"), WORDS, ids=lambda part: str(part)[:50])
def test_errors_name_the_value(server: Running, path: str, body: dict[str, Any], message: str) -> None:
    found = server.post(f"/v1/{path}", {**BODIES[path], **body})
    error = found.json()["error"]
    assert found.status_code == 400 and error["message"].startswith(message), error
    assert len(error["message"]) < 400


# ---- what is wrong in any way is refused with 4xx and one line; the server never fails on one --------------

DEEP = "[" * 5000 + "]" * 5000
SAID = '"messages": [{"role": "user", "content": "hello"}]'
#: path of /v1 and a body, as it is sent
BROKEN: list[tuple[str, str]] = [
    ("completions", ""),
    ("completions", "{"),
    ("completions", DEEP),
    ("completions", '{"prompt":' + DEEP + "}"),
    ("completions", '{"prompt": [-1]}'),
    ("completions", '{"prompt": [99999999999999999999]}'),
    ("completions", '{"prompt": "\\ud800"}'),
    ("completions", '{"prompt": "x", "temperature": NaN}'),
    ("completions", '{"prompt": "x", "seed": 9223372036854775807, "n": 2}'),
    ("completions", '{"prompt": "x", "n": 0}'),
    ("completions", '{"prompt": "x", "tokenswift": {"\\ud800": 1}}'),
    ("completions", '{"prompt": "x", "tokenswift": {"run_dir": "/tmp/kept"}}'),
    ("chat/completions", "{}"),
    ("chat/completions", '{"messages": [{"role": "tool", "content": "x"}]}'),
    (
        "chat/completions",
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    ),
    ("chat/completions", "{" + SAID + ', "tools": [{"type": "function", "function": {"name": "a b"}}]}'),
    ("chat/completions", "{" + SAID + ', "tools": [{"type": "function", "name": "\\ud800"}]}'),
    ("chat/completions", "{" + SAID + ', "tools": ' + DEEP[4900:-4900] + "}"),
    ("responses", '{"input": []}'),
    ("responses", '{"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}'),
    ("responses", '{"input": "x", "metadata": {"a": "\\ud800"}}'),
    ("responses", '{"input": "x", "previous_response_id": "../answers"}'),
]


@pytest.mark.parametrize(("path", "body"), BROKEN, ids=lambda value: value[:60])
def test_bodies(server: Running, path: str, body: str) -> None:
    found = httpx.post(
        f"{server.url}/v1/{path}",
        content=body.encode(),
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert 400 <= found.status_code < 500, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses/resp_" + "0" * 32, 404),
        ("GET", "/v1/responses/resp_1?stream=true&starting_after=x", 400),
        ("GET", "/v1/responses/resp_1?stream=true&starting_after=-2", 400),
        ("GET", "/v1/models/none", 404),
        ("GET", "/%ff%00", 404),
        ("POST", "/", 405),
    ],
)
def test_paths(server: Running, method: str, path: str, status: int) -> None:
    found = httpx.request(method, f"{server.url}{path}", timeout=60)
    assert found.status_code == status and found.json()["error"]["message"], found.text


def schemathesis(server: Running, folder: Path, *bounds: str) -> None:
    """Requests made from the description of the interface, valid and not."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *bounds]
    command += ["--checks", "not_a_server_error", "--request-timeout", "60"]
    command += ["--continue-on-failure", "--no-color"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "not_a_server_error" in done.stdout or "passed" in done.stdout, done.stdout[-2000:]


def test_the_description(start: Start, tmp_path: Path) -> None:
    """In the form that generators and clients read; then a few made requests of each kind."""
    server = start(max_tokens=8)
    described = server.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}"} <= set(
        described["paths"]
    )
    schemathesis(server, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "2")
