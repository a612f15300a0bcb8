"""OpenAI's own client runs unchanged, every chunk is of its types, and the text is plain
decoding's."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.serve.conftest import Running, Start
from tokenswift import LLM

EVENT: TypeAdapter[object] = TypeAdapter(ResponseStreamEvent)
CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
]
NEW = 40
COLOUR: dict[str, object] = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}
COLOUR |= {"required": ["colour"], "additionalProperties": False}


def alone(llm: LLM, prompt: Any, **more: Any) -> str:
    """The text of plain decoding."""
    options: Any = {"seed": 5, **more}
    return llm.generate(prompt, NEW, "autoregressive", **options).text


def streamed(server: Running, path: str, body: dict[str, Any]) -> list[str]:
    """The data of a stream's events, as they are on the wire."""
    with httpx.stream(
        "POST", f"{server.url}{path}", json={"stream": True, **body}, timeout=60
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [
            line.removeprefix("data: ")
            for line in response.iter_lines()
            if line.startswith("data: ")
        ]


def test_models(server: Running, start: Start) -> None:
    """A server has one model, which answers a request for another."""
    client = server.client()
    (model,) = client.models.list().data
    assert model.id == "chatty"
    assert client.models.retrieve("chatty").id == "chatty"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served; valid: chatty"):
        client.models.retrieve("gpt")
    assert (
        client.chat.completions.create(model="gpt", messages=CHAT, max_tokens=2).model == "chatty"
    )
    named = start(served_model_name="mine/best").client()
    assert named.models.retrieve("mine/best").id == named.models.list().data[0].id == "mine/best"


def test_chat(server: Running, llm: LLM) -> None:
    completion = server.client().chat.completions.create(
        model="chatty", messages=CHAT, max_tokens=NEW, seed=5
    )
    ChatCompletion.model_validate(completion.to_dict(), strict=True)
    assert completion.choices[0].message.content == alone(llm, CHAT)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(llm.encode(CHAT))
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == NEW


def test_chat_as_a_stream(server: Running, llm: LLM) -> None:
    body = {
        "messages": CHAT,
        "max_tokens": NEW,
        "seed": 5,
        "stream_options": {"include_usage": True},
    }
    *lines, last = streamed(server, "/v1/chat/completions", body)
    chunks = [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines]
    assert last == "[DONE]"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == alone(llm, CHAT)
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NEW
    assert all(c.usage is None for c in chunks[:-1])


def test_completion(server: Running, llm: LLM) -> None:
    """A text, and ids; whole and as a stream."""
    create: Any = server.client().completions.create
    wanted = alone(llm, "hello")
    for prompt in ("hello", llm.encode("hello"), ["hello"]):
        completion = create(model="chatty", prompt=prompt, max_tokens=NEW, seed=5)
        Completion.model_validate(completion.to_dict(), strict=True)
        assert completion.choices[0].text == wanted
        assert completion.usage.prompt_tokens == len(llm.encode("hello"))
    stream = create(model="chatty", prompt="hello", max_tokens=NEW, seed=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted


def test_penalties_biases_and_words(server: Running, llm: LLM) -> None:
    """The fields of OpenAI's interface, and of vLLM's."""
    penalties: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    penalties["logit_bias"] = {"7": -100, "9": 3}
    more = {
        "min_tokens": 9,
        "bad_words": ["a"],
        "stop_token_ids": [9],
        "tokenswift": {"dry_multiplier": 0.8},
    }
    completion = server.client().chat.completions.create(
        model="chatty", messages=CHAT, max_tokens=NEW, seed=5, **penalties, extra_body=more
    )
    sampling: dict[str, Any] = {
        **penalties,
        "min_tokens": 9,
        "bad_words": ["a"],
        "stop": [[9]],
        "dry_multiplier": 0.8,
    }
    generation = llm.generate(CHAT, NEW, "autoregressive", seed=5, **sampling)
    assert completion.choices[0].message.content == generation.text != alone(llm, CHAT)
    assert generation.finish_reason == "stop"
    assert completion.usage is not None
    assert len(generation.token_ids) == completion.usage.completion_tokens > 9


def test_no_seed_is_another_text_each_time(server: Running) -> None:
    """As OpenAI's server has it; what was drawn is told."""
    texts: dict[str, int] = {}
    for _ in range(2):
        completion: Any = server.client().completions.create(
            model="chatty", prompt="hello", max_tokens=NEW
        )
        texts[completion.choices[0].text] = completion.tokenswift["seed"]
    (first, seed), _ = texts.items()
    again = server.client().completions.create(
        model="chatty", prompt="hello", max_tokens=NEW, seed=seed
    )
    assert again.choices[0].text == first


def test_responses(server: Running, llm: LLM) -> None:
    client = server.client()
    call: Any = {"model": "chatty", "max_output_tokens": NEW, "extra_body": {"seed": 5}}
    response = client.responses.create(**call, input="Hello!", instructions="Be brief.")
    Response.model_validate(response.to_dict(), strict=True)
    assert response.output_text == alone(llm, CHAT)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    again = client.responses.create(**call, input=CHAT)
    assert again.output_text == response.output_text
    assert again.id != response.id
    assert client.responses.retrieve(again.id).output_text == response.output_text


def events(server: Running, name: str, after: int | None) -> list[Any]:
    """The events of a response from a place on, each checked against the client's types."""
    params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    with httpx.stream(
        "GET", f"{server.url}/v1/responses/{name}", params=params, timeout=60
    ) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return [EVENT.validate_json(line.removeprefix("data: "), strict=True) for line in lines]


def test_a_stream_is_taken_up_at_every_place(server: Running, llm: LLM) -> None:
    """From each number on come the events behind it, no more and no fewer."""
    stream = server.client().responses.create(
        model="chatty", input=CHAT, max_output_tokens=NEW, stream=True, extra_body={"seed": 5}
    )
    received = list(stream)
    numbers = [event.sequence_number for event in received]
    assert numbers == sorted(set(numbers))
    assert numbers[:4] == [0, 1, 2, 3]
    kinds = [event.type for event in received]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    first: Any = received[0]
    name = first.response.id
    pieces = {
        e.sequence_number: e.delta for e in received if e.type == "response.output_text.delta"
    }
    others = [e.sequence_number for e in received if e.type != "response.output_text.delta"]
    assert "".join(pieces.values()) == alone(llm, CHAT)
    for after in (None, *numbers):
        rest = events(server, name, after)
        start = -1 if after is None else after
        rest_numbers = [e.sequence_number for e in rest if e.type != "response.output_text.delta"]
        assert rest_numbers == [number for number in others if number > start]
        deltas = [event for event in rest if event.type == "response.output_text.delta"]
        assert "".join(e.delta for e in deltas) == "".join(
            text for at, text in pieces.items() if at > start
        )
        assert all(event.sequence_number > start for event in rest)
    assert events(server, name, 10**9) == []
