"""Tool calls and thoughts by OpenAI's own client and its helpers, unchanged."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.chat.templates import MISTRAL
from tests.chats import calling_model, calling_tokenizer, thinking_model, thinking_tokenizer
from tests.serve.conftest import Running, Start, until
from tests.serve.test_openai import COLOUR, streamed
from tokenswift import LLM
from tokenswift.serve import answer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Brest", "Zürich }"]
    days: Literal[1, 2]


TOOL: Any = pydantic_function_tool(Weather)
FLAT: Any = {"type": "function", **TOOL["function"]}


@pytest.fixture(scope="module")
def call(tools: Running) -> dict[str, Any]:
    """A request of a chat that calls a tool."""
    name = tools.get("/v1/models").json()["data"][0]["id"]
    return {
        "model": name,
        "messages": QUESTION,
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 400,
    }


def of_responses(call: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same of a response."""
    wanted = {
        "model": call["model"],
        "input": "How is the weather?",
        "tools": [FLAT],
        "temperature": 0,
    }
    return {**wanted, "max_output_tokens": 400, **more}


def test_a_loop_of_tools(tools: Running, call: dict[str, Any], calling: LLM) -> None:
    client = tools.client()
    first = client.chat.completions.create(**call)
    ChatCompletion.model_validate(first.to_dict(), strict=True)
    choice: Any = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    called = choice.message.tool_calls[0]
    alone = calling.chat(QUESTION, 400, "autoregressive", tools=[TOOL], temperature=0)
    assert called.function.arguments == alone.tool_calls[0].arguments
    Weather.model_validate_json(called.function.arguments)
    result = {
        "role": "tool",
        "tool_call_id": called.id,
        "content": [{"type": "text", "text": "rain"}],
    }
    second = client.chat.completions.create(
        **{**call, "messages": [*QUESTION, choice.message, result]}
    )
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("ok", "stop")
    assert second.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    "choice", ["auto", {"type": "function", "function": {"name": "Weather"}}, "none"]
)
def test_choices(tools: Running, call: dict[str, Any], choice: Any) -> None:
    """Whole and as a stream they are the same."""
    more = {**call, "tool_choice": choice, "temperature": 1, "seed": 4, "max_tokens": 300}
    complete = tools.client().chat.completions.create(**more).choices[0]
    called: list[Any] = complete.message.tool_calls or []
    assert bool(called) is (choice != "none")
    *lines, _ = streamed(tools, "/v1/chat/completions", more)
    chunks = [
        ChatCompletionChunk.model_validate_json(line, strict=True).choices[0] for line in lines
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (
        complete.message.content or ""
    )
    assert chunks[-1].finish_reason == complete.finish_reason
    pieces = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    spelt = "".join((one.function and one.function.arguments) or "" for one in pieces)
    assert spelt == "".join(one.function.arguments for one in called)
    assert [one.id for one in pieces if one.id] != [] or not called


def test_helpers_of_responses(tools: Running, call: dict[str, Any]) -> None:
    """``parse`` reads the arguments; a result goes on from the response's id."""
    client = tools.client()
    parsed = client.responses.parse(**of_responses(call, tools=[TOOL]))
    (item,) = parsed.output
    assert item.type == "function_call"
    assert isinstance(item.parsed_arguments, Weather)
    first = client.responses.create(**of_responses(call))
    Response.model_validate(first.to_dict(), strict=True)
    assert first.status == "completed"
    assert first.tool_choice == "auto"
    assert first.tools[0].type == "function"
    result = result_of(first)
    more = of_responses(call, input=result)
    second = client.responses.create(**more, previous_response_id=first.id)
    assert second.output_text == "ok"
    assert second.previous_response_id == first.id
    items: list[Any] = [{"type": "message", **QUESTION[0]}, first.output[0].to_dict(), *result]
    assert client.responses.create(**of_responses(call, input=items)).output_text == "ok"
    third = client.responses.create(
        **of_responses(call, input="And now?"), previous_response_id=second.id
    )
    assert third.usage
    assert second.usage
    assert third.usage.input_tokens > second.usage.input_tokens


def result_of(response: Response) -> list[Any]:
    """The result of a response's call, as an input."""
    called: Any = response.output[0]
    return [{"type": "function_call_output", "call_id": called.call_id, "output": "rain"}]


def test_going_on_from_a_response_after_a_restart(
    start: Start, calling: LLM, call: dict[str, Any], tmp_path: Path
) -> None:
    """What was said before is stored with the answer, and lasts longer than what it came from."""
    folder = str(tmp_path / "answers")
    before = start(calling, run_dir=folder)
    first = before.client().responses.create(**of_responses(call))
    before.close()
    server = start(calling, run_dir=folder)
    client = server.client()
    more = of_responses(call, input=result_of(first))
    second = client.responses.create(**more, previous_response_id=first.id)
    assert second.output_text == "ok"
    client.responses.delete(first.id)
    server.close()
    client = start(calling, run_dir=folder).client()
    assert client.responses.retrieve(second.id).output_text == "ok"
    more = of_responses(call, input="And?")
    third = client.responses.create(**more, previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens > 100
    with pytest.raises(openai.BadRequestError, match="there is no response") as caught:
        client.responses.create(**of_responses(call), previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_response_is_deleted_while_its_end_is_written(
    start: Start,
    calling: LLM,
    call: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start(calling, run_dir=str(tmp_path / "answers"))
    client = server.client()
    first = client.responses.create(**of_responses(call))
    write = answer.write_whole
    pause = 0.3

    def write_slowly(path: Path, data: bytes) -> None:
        time.sleep(pause)
        write(path, data)

    monkeypatch.setattr(answer, "write_whole", write_slowly)
    slow = client.responses.create(**of_responses(call), background=True)
    assert until(lambda: server.answers.known[slow.id].reason != "")
    for name in (slow.id, first.id):
        client.responses.delete(name)
    time.sleep(2 * pause)
    assert not (tmp_path / "answers" / slow.id).exists()
    assert not (tmp_path / "answers" / first.id).exists()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_call_that_is_cut_is_no_whole_one(tools: Running, call: dict[str, Any]) -> None:
    completion = tools.client().chat.completions.create(**{**call, "max_tokens": 60})
    choice = completion.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls
    with pytest.raises(ValueError):
        json.loads(choice.message.tool_calls[0].function.arguments)  # type: ignore[union-attr]
    cut = tools.client().responses.create(**of_responses(call, max_output_tokens=60))
    assert cut.status == "incomplete" and cut.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_answers_of_ours_are_taken_again(start: Start) -> None:
    """Also where the template wants ids of nine letters and digits, and whatever a client's are;
    a result whose call is not in the conversation is told by its tool's name."""
    tokenizer = calling_tokenizer(MISTRAL)
    llm = LLM.from_model(calling_model(4096, tokenizer), tokenizer, heads=None)
    create: Any = start(llm).client().chat.completions.create
    how = {"model": "x", "tools": [TOOL], "temperature": 0}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    message = create(messages=QUESTION, **how, **forced).choices[0].message.to_dict()
    key = message["tool_calls"][0]["id"]
    assert re.fullmatch("[a-z0-9]{9}", key)
    for name in (key, "call_" + 24 * "f"):
        message["tool_calls"][0]["id"] = name
        result = {"role": "tool", "tool_call_id": name, "content": "rain"}
        again = create(messages=[*QUESTION, message, result], max_tokens=1, **how)
        assert again.choices[0].finish_reason == "length"
    result = {"role": "tool", "tool_call_id": "gone", "name": "clock", "content": "noon"}
    create(messages=[*QUESTION, result], max_tokens=1, **how)
    del result["name"]
    with pytest.raises(openai.BadRequestError, match="tool_call_id is 'gone'; valid: the id of a"):
        create(messages=[*QUESTION, result], **how)


# ---- what a model thinks before it answers -------------------------------------------------------

HI: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": HI, "temperature": 0, "max_tokens": 60}
RESPONSE: dict[str, Any] = {"input": "Hi", "temperature": 0, "max_output_tokens": 60}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}


@pytest.fixture(scope="module")
def thinking() -> LLM:
    """A model that thinks "y" and answers "o"."""
    return LLM.from_model(thinking_model(), thinking_tokenizer(), heads=None)


@pytest.fixture(scope="module")
def thinks(thinking: LLM) -> Iterator[Running]:
    running = Running(thinking)
    yield running
    running.close()


def test_a_chat(thinks: Running) -> None:
    """Whole and as a stream: the thought stands apart, and a schema holds behind it."""
    create: Any = thinks.client().chat.completions.create
    for form in ({}, {"response_format": FORM}):
        message = create(model="x", **CHAT, **form).choices[0].message
        assert message.reasoning_content == "y"
        assert (
            json.loads(message.content)["colour"] in ("red", "blue")
            if form
            else message.content == "o"
        )
        pieces = {"content": "", "reasoning_content": ""}
        for line in streamed(thinks, "/v1/chat/completions", {**CHAT, **form})[:-1]:
            delta = ChatCompletionChunk.model_validate_json(line, strict=True).choices[0].delta
            for name in pieces:
                pieces[name] += getattr(delta, name, None) or ""
        assert pieces == {"content": message.content, "reasoning_content": "y"}
    ChatCompletion.model_validate(create(model="x", **CHAT).to_dict(), strict=True)
    cut = create(model="x", **{**CHAT, "max_tokens": 8}).choices[0]
    assert (cut.message.content, cut.message.reasoning_content, cut.finish_reason) == (
        "",
        "y",
        "length",
    )
    plain = (
        create(model="x", **CHAT, reasoning_effort="none", response_format=FORM).choices[0].message
    )
    assert json.loads(plain.content)["colour"]
    assert not hasattr(plain, "reasoning_content")
    text = thinks.post(
        "/v1/completions", {"prompt": "assistant:", "temperature": 0, "max_tokens": 60}
    )
    assert text.json()["choices"][0]["text"] == "<think>y</think>o", (
        "a text that is continued is text"
    )


def test_a_response(thinks: Running) -> None:
    """A reasoning item before the message; events that can be taken up at every place."""
    response = thinks.client().responses.create(model="x", **RESPONSE)
    Response.model_validate(response.to_dict(), strict=True)
    thought, message = response.output
    assert thought.type == "reasoning"
    assert thought.content
    assert thought.content[0].text == "y"
    assert message.type == "message"
    assert response.output_text == "o"
    lines = streamed(thinks, "/v1/responses", RESPONSE)
    events = [EVENT.validate_json(line, strict=True) for line in lines]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    again = [thought.to_dict(), message.to_dict()]
    items: Any = [{"role": "user", "content": "Hi"}, *again, {"role": "user", "content": "And?"}]
    assert (
        thinks.client().responses.create(model="x", **{**RESPONSE, "input": items}).output_text
        == "o"
    )
