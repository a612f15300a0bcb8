"""Tools with real models, by OpenAI's client over HTTP: rounds of calls, several at once, as a
stream, and a named tool. Slow, and only for models that are in the cache already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.serve.conftest import Running
from tokenswift import LLM
from tokenswift.loader.find import cache_dir

pytestmark = pytest.mark.slow
FOLDER = cache_dir() / "benchmarks"
MODELS = ("qwen2.5-coder-0.5b-q4_k_m", "qwen2.5-coder-1.5b-q4_k_m")
CITY = {"type": "string", "description": "The name of the city."}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    "time_in": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
}
DESCRIBED = {
    "weather": "The present weather in a city.",
    "time_in": "The present time in a city.",
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": DESCRIBED[name], "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
ANSWERS = {"weather": "heavy rain, 12 degrees", "time_in": "14:35"}
ASKED: Any = {"role": "user", "content": "What is the weather in Brest? Call a tool."}
BOTH: Any = {"role": "user", "content": "Call weather for Brest, and weather for Bergen, at once."}


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A real model that is served."""
    file = FOLDER / f"{request.param}.gguf"
    if not file.exists():
        pytest.skip(f"{file.name} is not in the cache")
    with LLM(str(file), heads=None) as llm:
        running = Running(llm)
        yield running
        running.close()


def create(server: Running, messages: list[Any], **more: Any) -> Any:
    how = {"model": "x", "tools": TOOLS, "temperature": 0, "max_tokens": 160, "seed": 7}
    return server.client().chat.completions.create(messages=messages, **{**how, **more})


def check(calls: Any) -> list[str]:
    """See that calls are valid; the cities that they name."""
    cities: list[str] = []
    for call in calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        cities.append(arguments["city"])
    return cities


def results(calls: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": ANSWERS[call.function.name]}
        for call in calls
    ]


def test_two_rounds(server: Running) -> None:
    """A call, its result, an answer from it; then a second question, with all that before it."""
    messages: list[Any] = [ASKED]
    for city in ("Brest", "Bergen"):
        choice = create(server, messages, parallel_tool_calls=False).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert check(choice.message.tool_calls) == [city]
        messages += [choice.message, *results(choice.message.tool_calls)]
        last = create(server, messages, tool_choice="none").choices[0]
        assert last.finish_reason == "stop"
        assert "rain" in last.message.content
        messages += [last.message, {"role": "user", "content": "And in Bergen? Call a tool."}]


def test_several_calls(server: Running) -> None:
    """Answers with several calls are taken again, with their results."""
    choice = create(server, [BOTH], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert "Brest" in check(choice.message.tool_calls)
    again = [BOTH, choice.message, *results(choice.message.tool_calls)]
    last = create(server, again, tool_choice="none").choices[0]
    assert last.finish_reason in ("stop", "length")
    assert last.message.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streams(server: Running, choice: str) -> None:
    """A stream brings the calls that come as a whole."""
    whole = create(server, [ASKED], tool_choice=choice).choices[0].message
    names: list[str] = []
    arguments: dict[int, str] = {}
    for chunk in create(server, [ASKED], tool_choice=choice, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            names += [piece.function.name] if piece.function.name else []
            arguments[piece.index] = arguments.get(piece.index, "") + piece.function.arguments
    assert names == [call.function.name for call in whole.tool_calls]
    assert [*arguments.values()] == [call.function.arguments for call in whole.tool_calls]


def test_a_named_tool(server: Running) -> None:
    named = {"type": "function", "function": {"name": "time_in"}}
    choice = create(server, [ASKED], tool_choice=named, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["time_in"]
    assert check(choice.message.tool_calls)
