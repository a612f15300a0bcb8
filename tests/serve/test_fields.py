"""What fields of a request mean: answered as asked, or refused under the name that was sent."""

from __future__ import annotations

import logging
import threading
from typing import Any, TypeAlias

import pytest

from tests.serve.conftest import Running, Start
from tokenswift import LLM
from tokenswift.serve import bodies

Fields: TypeAlias = dict[str, object]
HELLO: list[Fields] = [{"role": "user", "content": "Hello!"}]
CHAT: Fields = {"messages": HELLO, "max_tokens": 8, "seed": 5}
TEXT: Fields = {"prompt": "hello", "max_tokens": 8, "seed": 5}
SAID: Fields = {"input": "Hello!", "max_output_tokens": 8, "seed": 5}
LEAST = {"chat/completions": CHAT, "completions": TEXT, "responses": SAID}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "any"}}}
UNKNOWN_SCHEMA = "the JSON schema cannot be compiled (Invalid type: any)"
FORMAT = {"type": "json_schema", "name": "c", "schema": BAD_SCHEMA}
USER = {"role": "user", "content": "Hi"}

#: endpoint, fields, the field that is named, and what the line begins with
REFUSED: list[tuple[str, Fields, str, str]] = [
    (
        "chat/completions",
        {"max_tokens": 4, "max_completion_tokens": 9},
        "max_tokens",
        "max_completion_tokens is 9, max_tokens is 4; valid: one of them, or both alike",
    ),
    (
        "chat/completions",
        {"min_tokens": 9},
        "min_tokens",
        "min_tokens is 9, max_tokens 8; valid: up to 8, or a larger max_tokens",
    ),
    (
        "responses",
        {"min_tokens": 2000, "max_output_tokens": None},
        "min_tokens",
        "min_tokens is 2000, max_output_tokens ",
    ),
    (
        "completions",
        {"stop_token_ids": [1, 260]},
        "stop_token_ids",
        "stop_token_ids holds 260; valid: 0 to 259, the model's vocabulary",
    ),
    (
        "completions",
        {"stop_token_ids": [-1]},
        "stop_token_ids",
        "stop_token_ids holds -1; valid: 0 to 259, the model's vocabulary",
    ),
    (
        "completions",
        {"stop_token_ids": [1] * 600, "stop": ["x"] * 600},
        "stop_token_ids",
        "stop and stop_token_ids hold 1,200 entries; valid: up to 1,024 in all",
    ),
    ("chat/completions", {"messages": [USER, 5]}, "messages", "messages[1] is 5; valid: "),
    ("responses", {"input": [USER, 5]}, "input", "input"),
    ("completions", {"stop_token_ids": [1, "x"]}, "stop_token_ids", "stop_token_ids[1] is 'x'; "),
    ("completions", {"max_tokens": "x"}, "max_tokens", "max_tokens is 'x'; valid: "),
    ("completions", {"tokenswift": 5}, "tokenswift", "tokenswift is 5; valid: "),
    ("completions", {"stop": ["y", 5.5]}, "stop", "stop is ['y', 5.5]; valid: "),
    ("completions", {"prompt": [260]}, "prompt", "prompt token id is 260; valid: 0 to 259"),
    ("completions", {"max_tokens": -2}, "max_tokens", "max_tokens is -2; valid: an integer from"),
    ("completions", {"max_tokens": 0}, "max_tokens", "max_tokens is 0; valid: an integer from"),
    ("completions", {"top_p": -0.1}, "top_p", "top_p is -0.1; valid: in (0, 1]"),
    ("completions", {"seed": 2**64}, "seed", "seed is 18446744073709551616; valid: "),
    ("completions", {"seed": -(2**63) - 1}, "seed", "seed is -9223372036854775809; valid: "),
    (
        "chat/completions",
        {"messages": [USER, {"role": "user"}]},
        "messages",
        "messages[1].content is missing; valid: text",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": 5}]},
        "messages",
        "messages[0].content is 5; valid: text",
    ),
    (
        "chat/completions",
        {"messages": [{"role": 5, "content": "x"}]},
        "messages",
        "messages[0].role is 5; valid: system, ",
    ),
    (
        "chat/completions",
        {"messages": [USER, {"role": "tool", "tool_call_id": "none", "content": "x"}]},
        "messages",
        "messages[1].tool_call_id is 'none'; valid: the id of a call",
    ),
    (
        "responses",
        {"instructions": "Be brief.", "input": [USER, {"role": "user", "content": 5}]},
        "input",
        "input[1].content is 5; valid: text",
    ),
    (
        "responses",
        {
            "instructions": "Be brief.",
            "input": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}],
        },
        "input",
        "input[1].tool_call_id is 'c'; valid: the id of a call",
    ),
    (
        "responses",
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input",
        "input[0].type is 'item_reference'; valid: previous_response_id, or the item itself",
    ),
    ("responses", {"input": [{"type": 5}]}, "input", "input[0].type is 5; valid: message, "),
    (
        "responses",
        {"input": [{"type": "web_search_call"}]},
        "input",
        "input holds no message; valid: text, or at least one message",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
        "response_format",
        UNKNOWN_SCHEMA,
    ),
    ("responses", {"text": {"format": FORMAT}}, "text", UNKNOWN_SCHEMA),
    (
        "chat/completions",
        {"chat_template_kwargs": {"tools": 1}},
        "chat_template_kwargs",
        "chat_template_kwargs holds 'tools'; valid: names of the template's variables",
    ),
    (
        "chat/completions",
        {"tokenswift": {"strategy": "magicdec"}},
        "strategy",
        "strategy is 'magicdec'; valid: auto, autoregressive (others with tokenswift serve",
    ),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "line"), REFUSED, ids=lambda part: str(part)[:40]
)
def test_a_refusal_names_the_field_that_was_sent(
    server: Running, path: str, fields: Fields, param: str, line: str
) -> None:
    reply = server.post(f"/v1/{path}", {**LEAST[path], **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert error["message"].startswith(line), error
    assert error["param"] == param, error


#: fields that mean the same as other arguments of `LLM.generate`
SAME: list[tuple[Fields, Fields]] = [
    ({"temperature": 0, "top_p": 0}, {"temperature": 0}),
    ({"top_p": 0}, {"temperature": 0}),
    ({"max_tokens": 8.0}, {}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"stop": ""}, {}),
    ({"min_tokens": 8}, {"min_tokens": 8}),
    ({"stop_token_ids": [259, 0]}, {"stop": [[259], [0]]}),
    ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    ({"seed": 2**63}, {"seed": 0}),
    ({"seed": 2**64 - 1}, {"seed": 2**63 - 1}),
    ({"seed": -2}, {"seed": 2**63 - 2}),
    ({"seed": -(2**63)}, {"seed": 0}),
]


@pytest.mark.parametrize(("fields", "arguments"), SAME, ids=lambda part: str(part)[:40])
def test_values_of_other_servers_are_taken(
    server: Running, llm: LLM, fields: Fields, arguments: Fields
) -> None:
    reply = server.post("/v1/completions", {**TEXT, **fields}).json()
    options: Any = {"seed": 5, **arguments}
    wanted = llm.generate("hello", 8, "autoregressive", **options)
    assert reply["choices"][0]["text"] == wanted.text
    assert reply["tokenswift"]["seed"] == arguments.get("seed", 5)


@pytest.mark.parametrize("more", [{}, {"max_completion_tokens": -1}])
def test_a_length_of_minus_one_is_as_long_as_fits(server: Running, llm: LLM, more: Fields) -> None:
    body = {**CHAT, "max_tokens": -1, "tokenswift": {"ignore_eos": True}, **more}
    reply = server.post("/v1/chat/completions", body).json()
    assert reply["usage"]["completion_tokens"] == 1024 - len(llm.encode(HELLO))


def test_two_lengths_that_are_alike_are_one(server: Running) -> None:
    body = {**CHAT, "max_completion_tokens": 8, "tokenswift": {"ignore_eos": True}}
    reply = server.post("/v1/chat/completions", body).json()
    assert reply["usage"]["completion_tokens"] == 8


def test_items_of_other_servers_are_left_out(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tokenswift")
    foreign = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "o"},
        {"type": "reasoning", "summary": []},
        {"type": "new\nline"},
    ]
    alone = server.post("/v1/responses", {**SAID, "input": [USER]}).json()
    reply = server.post("/v1/responses", {**SAID, "input": [*foreign, USER]}).json()
    assert reply["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    assert reply["output"][0]["content"] == alone["output"][0]["content"]
    assert "input[0] (web_search_call), input[1] (custom_tool_call)" in caplog.text
    assert "input[4] (new\\nline)" in caplog.text
    assert "(reasoning)" not in caplog.text


# ---- strategies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["auto", "autoregressive"])
def test_a_server_offers_strategies_that_share(server: Running, strategy: str) -> None:
    body = {**TEXT, "tokenswift": {"strategy": strategy}}
    assert server.post("/v1/completions", body).status_code == 200


def test_other_strategies_have_to_be_allowed(start: Start, llm: LLM) -> None:
    server = start(allow_strategies=True)
    body = {**TEXT, "tokenswift": {"strategy": "magicdec"}}
    reply = server.post("/v1/completions", body).json()
    assert reply["choices"][0]["text"] == llm.generate("hello", 8, seed=5).text
    wrong = server.post("/v1/completions", {**TEXT, "tokenswift": {"strategy": "best"}})
    message = wrong.json()["error"]["message"]
    assert message.startswith("strategy is 'best'; valid: auto, autoregressive, tokenswift")


# ---- large bodies --------------------------------------------------------------------------------


def function(name: str, parameters: object) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(levels: int) -> Fields:
    value: Fields = {}
    for _ in range(levels):
        value = {"a": value}
    return value


WIDE = {"properties": {str(i): {} for i in range(20_000)}}
LONG = {"description": "x" * 600_000}
TOO_LARGE: list[tuple[Fields, str]] = [
    ({"tools": [function(f"t{i}", {}) for i in range(300)]}, "tools holds 300 tools; valid: "),
    ({"tools": [function("t", WIDE)]}, "tools is too large; valid: up to 524,288 characters"),
    ({"tools": [function("t", LONG)]}, "tools is too large; valid: "),
    ({"tools": [function("t", nested(80))]}, "tools is too large; valid: "),
    ({"response_format": {"type": "json_object", "schema": WIDE}}, "response_format is too large"),
    ({"metadata": nested(80)}, "metadata is too large; valid: "),
    ({"tokenswift": {"grammar": LONG}}, "tokenswift is too large; valid: "),
]


@pytest.mark.parametrize(("fields", "line"), TOO_LARGE, ids=lambda part: str(part)[:40])
def test_large_values_are_refused_before_they_are_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, fields: Fields, line: str
) -> None:
    def request(*args: object) -> None:
        raise AssertionError("the body was read")

    monkeypatch.setattr("tokenswift.serve.base.Body.request", request)
    reply = server.post("/v1/chat/completions", {**CHAT, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(line)


def test_a_large_body_is_read_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    parse = bodies.parse_body

    def seen(kind: Any, raw: bytes) -> object:
        threads.append(threading.current_thread().name)
        return parse(kind, raw)

    monkeypatch.setattr(bodies, "parse_body", seen)
    server.post("/v1/completions", TEXT)
    server.post("/v1/completions", {**TEXT, "unknown": "x" * 100_000})
    small, large = threads
    assert small != large
    assert "asyncio" in large


def test_the_largest_body(server: Running) -> None:
    reply = server.post("/v1/completions", {**TEXT, "unknown": "x" * 2**21})
    assert reply.status_code == 413
    assert "longer than 2,097,152 bytes" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_says_it_is_no_json(server: Running, kind: str) -> None:
    reply = server.post("/v1/completions", TEXT, headers={"content-type": kind})
    assert reply.status_code == 415
    assert reply.json()["error"]["message"] == (
        f"the content-type is '{kind}'; valid: content-type: application/json"
    )
