"""Tools with real models, by OpenAI's client over HTTP: rounds of calls, several at once, as a
stream, and a named tool. Slow, and only for models that are in the cache already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import jsonschema
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion import Choice

from tests.serve.conftest import Running
from tokenswift import LLM
from tokenswift.loader.default_model import cache_dir
from tokenswift.loader.named_models import QWEN, QWEN_SMALL

Message: TypeAlias = dict[str, object] | ChatCompletionMessage
pytestmark = pytest.mark.slow
MODELS = (QWEN_SMALL, QWEN)
CITY: dict[str, object] = {"type": "string", "description": "The name of the city."}
SCHEMAS: dict[str, dict[str, object]] = {
    "weather": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    "time_in": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
}
DESCRIBED = {
    "weather": "The present weather in a city.",
    "time_in": "The present time in a city.",
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": DESCRIBED[name], "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
ANSWERS = {"weather": "heavy rain, 12 degrees", "time_in": "14:35"}
QUESTION: Message = {"role": "user", "content": "What is the weather in Brest? Call a tool."}
BOTH: Message = {
    "role": "user",
    "content": "Call weather for Brest, and weather for Bergen, at once.",
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.stem)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A real model that is served."""
    file = request.param.path(cache_dir())
    if not request.param.is_whole(cache_dir()):
        pytest.skip(f"{file.name} is not in the cache")
    with LLM(str(file), heads=None) as llm:
        running = Running(llm)
        yield running
        running.close()


def request(messages: list[Message], **more: object) -> Any:
    """Arguments of the client."""
    usual = {"model": "x", "tools": TOOLS, "temperature": 0, "max_tokens": 160, "seed": 7}
    return {"messages": messages, **usual, **more}


def answer(server: Running, messages: list[Message], **more: object) -> Choice:
    """What the model answers."""
    arguments = request(messages, **more)
    return server.client().chat.completions.create(**arguments).choices[0]


def calls_of(message: ChatCompletionMessage) -> list[ChatCompletionMessageFunctionToolCall]:
    return [call for call in message.tool_calls or [] if call.type == "function"]


def checked(choice: Choice) -> list[str]:
    """See that calls are valid; the cities that they name."""
    cities: list[str] = []
    for call in calls_of(choice.message):
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        cities.append(arguments["city"])
    return cities


def results(choice: Choice) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": ANSWERS[call.function.name]}
        for call in calls_of(choice.message)
    ]


def test_two_rounds(server: Running) -> None:
    """A call, its result, an answer from it; then a second question, with all that before it.

    The second call is forced: behind an answer in words, some models invent the weather however
    they are asked, and no call that could be read is in what they write.
    """
    messages: list[Message] = [QUESTION]
    for city, tool_choice in (("Brest", "auto"), ("Bergen", "required")):
        choice = answer(server, messages, tool_choice=tool_choice, parallel_tool_calls=False)
        assert choice.finish_reason == "tool_calls"
        assert checked(choice) == [city]
        messages += [choice.message, *results(choice)]
        last = answer(server, messages, tool_choice="none")
        assert last.finish_reason == "stop"
        assert "rain" in str(last.message.content)
        messages += [last.message, {"role": "user", "content": "And in Bergen? Call a tool."}]


def test_several_calls(server: Running) -> None:
    """Answers with several calls are taken again, with their results."""
    choice = answer(server, [BOTH], tool_choice="required")
    assert choice.finish_reason == "tool_calls"
    assert "Brest" in checked(choice)
    last = answer(server, [BOTH, choice.message, *results(choice)], tool_choice="none")
    assert last.finish_reason in ("stop", "length")
    assert last.message.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streams(server: Running, choice: str) -> None:
    """A stream brings the calls that come as a whole."""
    calls = calls_of(answer(server, [QUESTION], tool_choice=choice).message)
    names: list[str] = []
    arguments: dict[int, str] = {}
    arguments_of_client = request([QUESTION], tool_choice=choice)
    for chunk in server.client().chat.completions.create(stream=True, **arguments_of_client):
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            names += filter(None, [piece.function.name])
            before = arguments.get(piece.index, "")
            arguments[piece.index] = before + str(piece.function.arguments)
    assert names == [call.function.name for call in calls]
    assert [*arguments.values()] == [call.function.arguments for call in calls]
    assert names


def test_a_named_tool(server: Running) -> None:
    named = {"type": "function", "function": {"name": "time_in"}}
    choice = answer(server, [QUESTION], tool_choice=named, parallel_tool_calls=False)
    assert [call.function.name for call in calls_of(choice.message)] == ["time_in"]
    assert checked(choice)
