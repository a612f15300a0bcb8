"""Requests that are wrong in any way are refused with 4xx and one line; the server never fails on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running, Start

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
DEEP = "[" * 5000 + "]" * 5000
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    """A tool of a chat."""
    return {"type": "function", "function": {"name": name, **more}}


def wrong_call(arguments: Any) -> dict[str, Any]:
    """A call whose arguments are none."""
    return {**CALL, "function": {"name": "f", "arguments": arguments}}


#: path of /v1 → bodies, as they are sent
WRONG: dict[str, list[str]] = {
    "completions": [
        "",
        "{",
        "{}",
        DEEP,
        '{"prompt":' + DEEP + "}",
        '{"prompt": [-1]}',
        '{"prompt": [99999999999999999999]}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "x", "model": "\\ud800"}',
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "x", "seed": 9223372036854775807, "n": 2}',
        '{"prompt": "x", "tokenswift": {"\\ud800": 1}}',
        '{"prompt": "x", "tokenswift": {"strategy_options": {"explain": "/tmp/explained"}}}',
        '{"prompt": "x", "tokenswift": {"run_dir": "/tmp/kept"}}',
    ],
    "chat/completions": [
        "{}",
        '{"messages": [{"role": "tool", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": "\\udfff"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}',
        json.dumps({"messages": [HELLO], "tools": [{"type": "function", "function": {"name": "a b"}}]}),
        json.dumps({"messages": [HELLO], "tools": [{"type": "function", "name": "\ud800"}]}),
        json.dumps({"messages": [HELLO], "tools": [tool(str(i)) for i in range(200)]}),
        json.dumps({"messages": [HELLO], "tools": [tool(parameters={"type": "array"})]}),
        json.dumps({"messages": [HELLO], "tools": [tool(parameters={"title": "x" * 70_000})]}),
        json.dumps({"messages": [HELLO], "tools": [tool(parameters={"a": json.loads(DEEP[4900:-4900])})]}),
        json.dumps(
            {"messages": [HELLO], "tools": [tool()], "tool_choice": {"type": "function", "name": "g"}}
        ),
        json.dumps({"messages": [HELLO, {"role": "user", "content": "", "tool_calls": [CALL]}]}),
        json.dumps({"messages": [HELLO, {"role": "assistant", "tool_calls": [wrong_call([1])]}]}),
        json.dumps({"messages": [HELLO], "structured_outputs": {"grammar": "root ::= (", "json": "{}"}}),
    ],
    "responses": [
        "{}",
        '{"input": []}',
        '{"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}',
        '{"input": "x", "previous_response_id": "resp_1"}',
        '{"input": "x", "previous_response_id": "../answers"}',
    ],
}
CASES = [(path, body) for path, bodies in WRONG.items() for body in bodies]


@pytest.mark.parametrize(
    ("path", "body"), CASES, ids=lambda value: value[:60].encode("unicode_escape").decode()
)
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
