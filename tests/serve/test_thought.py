"""What a model thinks before it answers, as clients of OpenAI's and vLLM's servers read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.chats import thinking_model, thinking_tokenizer
from tests.serve.conftest import Running, Start
from tests.serve.test_openai import COLOUR, streamed
from tokenswift import LLM

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": ASKED, "temperature": 0, "max_tokens": 60}
SAID: dict[str, Any] = {"input": "Hi", "temperature": 0, "max_output_tokens": 60}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}


@pytest.fixture(scope="module")
def thinking() -> LLM:
    """A model that thinks "y" and answers "o"."""
    return LLM.from_model(thinking_model(), thinking_tokenizer(), heads=None)


@pytest.fixture(scope="module")
def server(thinking: LLM) -> Iterator[Running]:
    running = Running(thinking)
    yield running
    running.close()


def test_a_chat(server: Running) -> None:
    """Whole and as a stream: the thought stands apart, and a schema holds behind it."""
    create: Any = server.client().chat.completions.create
    for form in ({}, {"response_format": FORM}):
        message = create(model="x", **CHAT, **form).choices[0].message
        assert message.reasoning_content == "y"
        assert json.loads(message.content)["colour"] in ("red", "blue") if form else message.content == "o"
        pieces = {"content": "", "reasoning_content": ""}
        for line in streamed(server, "/v1/chat/completions", {**CHAT, **form})[:-1]:
            delta = ChatCompletionChunk.model_validate_json(line, strict=True).choices[0].delta
            for name in pieces:
                pieces[name] += getattr(delta, name, None) or ""
        assert pieces == {"content": message.content, "reasoning_content": "y"}
    ChatCompletion.model_validate(create(model="x", **CHAT).to_dict(), strict=True)
    cut = create(model="x", **{**CHAT, "max_tokens": 8}).choices[0]
    assert (cut.message.content, cut.message.reasoning_content, cut.finish_reason) == ("", "y", "length")
    plain = create(model="x", **CHAT, reasoning_effort="none", response_format=FORM).choices[0].message
    assert json.loads(plain.content)["colour"] and not hasattr(plain, "reasoning_content")
    text = server.post("/v1/completions", {"prompt": "assistant:", "temperature": 0, "max_tokens": 60})
    assert text.json()["choices"][0]["text"] == "<think>y</think>o", "a text that is continued is text"


def test_a_response(server: Running) -> None:
    """A reasoning item before the message; events that can be taken up at every place."""
    found = server.client().responses.create(model="x", **SAID)
    Response.model_validate(found.to_dict(), strict=True)
    thought, message = found.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "y"
    assert message.type == "message" and found.output_text == "o"
    lines = streamed(server, "/v1/responses", SAID)
    whole = [EVENT.validate_json(line, strict=True) for line in lines]
    kinds = [event.type.removeprefix("response.") for event in whole]
    assert kinds == ["created", "in_progress", "output_item.added", "reasoning_text.delta",
                     "reasoning_text.done", "output_item.done", "output_item.added", "content_part.added",
                     "output_text.delta",
                     "output_text.done", "content_part.done", "output_item.done", "completed"]  # fmt: skip
    again = [thought.to_dict(), message.to_dict()]
    asked: Any = [{"role": "user", "content": "Hi"}, *again, {"role": "user", "content": "And?"}]
    assert server.client().responses.create(model="x", **{**SAID, "input": asked}).output_text == "o"


def test_an_answer_that_is_read_again(start: Start, thinking: LLM, tmp_path: Path) -> None:
    """The next server on the folder tells its thought apart, too."""
    first = start(thinking, run_dir=str(tmp_path / "answers"))
    name = first.client().responses.create(model="x", **SAID).id
    first.close()
    found = start(thinking, run_dir=str(tmp_path / "answers")).client().responses.retrieve(name)
    assert [item.type for item in found.output] == ["reasoning", "message"] and found.output_text == "o"
