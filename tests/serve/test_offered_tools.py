"""Tools whose schemas no grammar can hold: offered with any JSON object, and the others as ever."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.serve.conftest import Running, Start
from tokenswift import LLM
from tokenswift.serve.tools import MOST_UNBOUND

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Brest", "Pau"]}},
    "required": ["city"],
}
AHEAD = {"type": "object", "properties": {"code": {"type": "string", "pattern": "(?=a)b"}}}
FOREIGN = {"type": "object", "properties": {"a": {"$ref": "https://example.org/a.json"}}}


def function(name: str, parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chat_body(named: str, *offered: dict[str, object]) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": list(offered),
        "tool_choice": {"type": "function", "function": {"name": named}},
        "max_tokens": 200,
        "seed": 3,
    }


@pytest.mark.parametrize("schema", [AHEAD, FOREIGN, True], ids=["ahead", "foreign", "true"])
def test_a_tool_that_no_grammar_holds_is_offered(
    tools: Running, caplog: pytest.LogCaptureFixture, schema: object
) -> None:
    caplog.set_level(logging.WARNING, "tokenswift")
    body = chat_body("odd", function("odd", schema), function("weather", CITY))
    reply = tools.post("/v1/chat/completions", {**body, "tool_choice": "auto"})
    assert reply.status_code == 200, reply.text
    named = tools.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    call = named["tool_calls"][0]["function"]
    assert call["name"] == "odd"
    assert call["arguments"].startswith("{")
    warning = "calls of the tool odd may hold any JSON object: the JSON schema cannot be compiled"
    assert (warning in caplog.text) is (schema is not True)


def test_the_other_tools_are_held_to_their_schemas(tools: Running) -> None:
    body = chat_body("weather", function("odd", AHEAD), function("weather", CITY))
    message = tools.post("/v1/chat/completions", {**body, "temperature": 2}).json()["choices"][0]
    call = message["message"]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"])["city"] in ("Brest", "Pau")


def test_the_answer_shows_the_schema_that_was_sent(tools: Running) -> None:
    flat = {"type": "function", "name": "odd", "parameters": AHEAD}
    body = {"input": "Hi", "tools": [flat], "max_output_tokens": 9}
    assert tools.post("/v1/responses", body).json()["tools"][0]["parameters"] == AHEAD


def test_too_many_of_them_are_refused(tools: Running) -> None:
    """Each may take a core for seconds."""
    many = [function(f"odd{i}", AHEAD) for i in range(MOST_UNBOUND + 1)]
    reply = tools.post("/v1/chat/completions", {**chat_body("odd0", *many), "tool_choice": "auto"})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert "cannot be compiled" in error["message"]
    assert error["param"] == "tools"


@pytest.mark.parametrize("schema", [False, "object", {"type": "string"}, [1]])
def test_parameters_that_are_no_objects_are_refused(tools: Running, schema: object) -> None:
    body = chat_body("odd", function("odd", schema))
    assert tools.post("/v1/chat/completions", body).json()["error"]["param"] == "tools"


def test_they_are_offered_after_a_restart_too(start: Start, calling: LLM, tmp_path: Path) -> None:
    folder = str(tmp_path / "answers")
    flat: object = {"type": "function", "name": "odd", "parameters": AHEAD}
    body = {"input": "Hi", "tools": [flat], "max_output_tokens": 60, "background": True}
    server = start(calling, run_dir=folder)
    name = server.post("/v1/responses", body).json()["id"]
    server.close()
    again = start(calling, run_dir=folder)
    while (reply := again.get(f"/v1/responses/{name}").json())["status"] in (
        "queued",
        "in_progress",
    ):
        pass
    assert reply["status"] in ("completed", "incomplete"), reply
