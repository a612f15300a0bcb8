"""OpenAI's own client runs unchanged, every chunk is of its types, and the text is plain decoding's."""

from __future__ import annotations

import time
from functools import partial
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
from tokenswift.engine.detokenize import token_bytes
from tokenswift.serve.settings import Settings

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
NEW = 40
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def alone(llm: LLM, prompt: Any, **more: Any) -> str:
    """The text of plain decoding."""
    options: Any = {"seed": 5, **more}
    return llm.generate(prompt, NEW, "autoregressive", **options).text


def streamed(server: Running, path: str, body: dict[str, Any]) -> list[str]:
    """The data of a stream's events, as they are on the wire."""
    with httpx.stream("POST", f"{server.url}{path}", json={"stream": True, **body}, timeout=60) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith(
            "text/event-stream"
        )
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def test_models(server: Running, start: Start) -> None:
    """A server has one model: a request for another is answered by it, which a header says."""
    client = server.client()
    (model,) = client.models.list().data
    assert model.id == "chatty" and client.models.retrieve("chatty").id == "chatty"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served; valid: chatty"):
        client.models.retrieve("gpt")
    create = client.chat.completions.with_raw_response.create
    sent = create(model="gpt", messages=CHAT, max_tokens=2)
    assert sent.parse().model == "chatty" and sent.headers["x-left-out"] == "model"
    named = start(served_model_name=("gpt", "mine/best")).client()
    assert [one.id for one in named.models.list().data] == ["gpt", "mine/best"]
    assert named.models.retrieve("mine/best").id == "mine/best"
    assert named.chat.completions.create(model="mine/best", messages=CHAT, max_tokens=2).model == "gpt"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        (f"/hub/models--owner--a-name/snapshots/{'0a' * 20}", "owner/a-name"),
        (f"/models/mine/{'f' * 40}", "mine"),
    ],
)
def test_a_model_is_never_named_by_a_hash(model: str, name: str) -> None:
    assert Settings().names(model) == (name,)
    assert Settings(served_model_name=("a", "b")).names(model) == ("a", "b")


def test_chat(server: Running, llm: LLM) -> None:
    found = server.client().chat.completions.create(model="chatty", messages=CHAT, max_tokens=NEW, seed=5)
    ChatCompletion.model_validate(found.to_dict(), strict=True)
    assert found.choices[0].message.content == alone(llm, CHAT)
    assert found.usage is not None and found.usage.prompt_tokens == len(llm.encode(CHAT))
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == NEW


def test_chat_as_a_stream(server: Running, llm: LLM) -> None:
    body = {"messages": CHAT, "max_tokens": NEW, "seed": 5, "stream_options": {"include_usage": True}}
    *lines, last = streamed(server, "/v1/chat/completions", body)
    chunks = [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines]
    assert last == "[DONE]" and len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == alone(llm, CHAT)
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NEW and all(c.usage is None for c in chunks[:-1])


def test_several_texts(server: Running, llm: LLM) -> None:
    """``n`` texts have seeds in a row; several prompts are answered each."""
    found = server.client().completions.create(
        model="chatty", prompt=["hello", "world"], n=2, max_tokens=NEW, seed=5
    )
    Completion.model_validate(found.to_dict(), strict=True)
    wanted = [alone(llm, prompt, seed=seed) for prompt in ("hello", "world") for seed in (5, 6)]
    assert [choice.text for choice in found.choices] == wanted
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage is not None and found.usage.prompt_tokens == len(
        llm.encode("hello") + llm.encode("world")
    )
    texts = ["", "", "", ""]
    for chunk in server.client().completions.create(
        model="chatty", prompt=["hello", "world"], n=2, max_tokens=NEW, seed=5, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_end_with_the_text(server: Running, llm: LLM, stream: bool) -> None:
    """No token of a stop string is told, nor one whose text was held back for it."""
    whole = alone(llm, "hello")
    stop, held = whole[10:13], whole[4:6] + "never"
    ask = partial(server.client().completions.create, model="chatty", prompt="hello", max_tokens=NEW, seed=5)
    free: Any = ask(logprobs=1).choices[0].logprobs
    found: Any = ask(stop=[stop, held], stream=stream, logprobs=1)
    choices = [chunk.choices[0] for chunk in (found if stream else [found])]
    text, tokens, places = "", list[str](), list[int]()
    for choice in choices:
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            places += choice.logprobs.text_offset
            assert places[-1] < len(text)  # what is told stands in the text that was sent
    assert text == whole[: whole.index(stop)]
    told = [*zip(free.tokens, free.text_offset, strict=True)]
    assert [*zip(tokens, places, strict=True)] == [one for one in told if one[1] < len(text)]


def test_penalties_biases_and_words(server: Running, llm: LLM) -> None:
    """The fields of OpenAI's interface, and of vLLM's."""
    given: dict[str, Any] = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "9": 3},
    }
    more = {"min_tokens": 9, "bad_words": ["a"], "stop_token_ids": [9], "tokenswift": {"dry_multiplier": 0.8}}
    found = server.client().chat.completions.create(
        model="chatty", messages=CHAT, max_tokens=NEW, seed=5, **given, extra_body=more
    )
    own: dict[str, Any] = {**given, "min_tokens": 9, "bad_words": ["a"], "stop": [[9]], "dry_multiplier": 0.8}
    whole = llm.generate(CHAT, NEW, "autoregressive", seed=5, **own)
    assert found.choices[0].message.content == whole.text != alone(llm, CHAT)
    assert whole.finish_reason == "stop" and found.usage is not None
    assert len(whole.token_ids) == found.usage.completion_tokens > 9


def test_no_seed_is_another_text_each_time(server: Running) -> None:
    """As OpenAI's server has it; what was drawn is told."""
    texts: dict[str, int] = {}
    for _ in range(2):
        found: Any = server.client().completions.create(model="chatty", prompt="hello", max_tokens=NEW)
        texts[found.choices[0].text] = found.tokenswift["seed"]
    (first, seed), _ = texts.items()
    again = server.client().completions.create(model="chatty", prompt="hello", max_tokens=NEW, seed=seed)
    assert again.choices[0].text == first


def test_responses(server: Running, llm: LLM) -> None:
    client = server.client()
    found = client.responses.create(
        model="chatty",
        input="Hello!",
        instructions="Be brief.",
        max_output_tokens=NEW,
        extra_body={"seed": 5},
    )
    Response.model_validate(found.to_dict(), strict=True)
    assert found.output_text == alone(llm, CHAT)
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    again = client.responses.create(model="chatty", input=CHAT, max_output_tokens=NEW, extra_body={"seed": 5})
    assert again.output_text == found.output_text and again.id != found.id
    assert client.responses.retrieve(again.id).output_text == found.output_text


def events(server: Running, name: str, after: int | None) -> list[Any]:
    """The events of a response from a place on, each checked against the client's types."""
    params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    with httpx.stream("GET", f"{server.url}/v1/responses/{name}", params=params, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return [EVENT.validate_json(line.removeprefix("data: "), strict=True) for line in lines]


def test_a_stream_is_taken_up_at_every_place(server: Running, llm: LLM) -> None:
    """From each number on come the events behind it, no more and no fewer."""
    stream = server.client().responses.create(
        model="chatty", input=CHAT, max_output_tokens=NEW, stream=True, extra_body={"seed": 5}
    )
    whole = list(stream)
    numbers = [event.sequence_number for event in whole]
    assert numbers == sorted(set(numbers)) and numbers[:4] == [0, 1, 2, 3]
    kinds = [event.type for event in whole]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    first: Any = whole[0]
    name = first.response.id
    said: dict[int, str] = {
        e.sequence_number: e.delta for e in whole if e.type == "response.output_text.delta"
    }
    assert "".join(said.values()) == alone(llm, CHAT)
    for after in (None, *numbers):
        rest = events(server, name, after)
        start = -1 if after is None else after
        assert [e.sequence_number for e in rest if e.type != "response.output_text.delta"] == [
            e.sequence_number
            for e in whole
            if e.sequence_number > start and e.type != "response.output_text.delta"
        ]
        deltas = [event for event in rest if event.type == "response.output_text.delta"]
        assert "".join(e.delta for e in deltas) == "".join(text for at, text in said.items() if at > start)
        assert all(event.sequence_number > start for event in rest)
    assert events(server, name, 10**9) == []


LIKELY: dict[str, Any] = {"max_tokens": NEW, "seed": 5, "tokenswift": {"ignore_eos": True}}


def text(token: bytes | list[int] | None) -> str:
    return bytes(token or ()).decode(errors="replace")


def told(llm: LLM, prompt: Any, top: int) -> tuple[list[bytes], list[float], list[dict[str, float]]]:
    """Tokens of plain decoding, their log-probabilities, and the likeliest ones there."""
    options: Any = {"seed": 5, "ignore_eos": True, "logprobs": top}
    found = llm.generate(prompt, NEW, "autoregressive", **options)
    spell = partial(token_bytes, llm.tokenizer)
    tops = [{text(spell(token)): value for token, value in one.top[::-1]} for one in found.logprobs]
    return [spell(token) for token in found.token_ids], [one.logprob for one in found.logprobs], tops


def test_logprobs_of_a_chat(server: Running, llm: LLM) -> None:
    tokens, values, tops = told(llm, CHAT, 2)
    body = {**LIKELY, "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    said = server.post("/v1/chat/completions", body).json()
    whole = ChatCompletion.model_validate(said, strict=True).choices[0].logprobs
    *lines, _ = streamed(server, "/v1/chat/completions", body)
    chunks = [ChatCompletionChunk.model_validate_json(line, strict=True).choices[0] for line in lines]
    pieces = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content or ()]
    assert whole is not None and whole.content is not None and len(chunks) > 3
    for content in (whole.content, pieces):
        assert [bytes(one.bytes or ()) for one in content] == tokens
        assert [one.logprob for one in content] == values
        assert [{top.token: top.logprob for top in one.top_logprobs[::-1]} for one in content] == tops
        assert all(one.token == text(one.bytes) for one in content)
    for chunk in chunks:  # those of a chunk are those of its text
        spelt = "".join(one.token for one in (chunk.logprobs and chunk.logprobs.content) or ())
        said = chunk.delta.content or ""
        assert "\ufffd" in spelt + said or spelt == said


def test_logprobs_of_a_completion(server: Running, llm: LLM) -> None:
    """The token itself is always among the likeliest, as OpenAI's server has it."""
    tokens, values, tops = told(llm, "hello", 3)
    body = {**LIKELY, "prompt": "hello", "logprobs": 3}
    whole = Completion.model_validate(server.post("/v1/completions", body).json(), strict=True).choices[0]
    found: Any = whole.logprobs
    assert found.tokens == list(map(text, tokens)) and found.token_logprobs == values
    wanted = [{text(own): value} | top for own, value, top in zip(tokens, values, tops, strict=True)]
    assert found.top_logprobs == wanted
    for token, place in zip(found.tokens, found.text_offset, strict=True):
        assert "\ufffd" in token or whole.text[place:].lstrip("\ufffd").startswith(token)


def test_cancel(start: Start, slowed: Any) -> None:
    llm, slow = slowed
    server = start(llm)
    client = server.client()
    slow.pause = 0.02
    own = {"tokenswift": {"ignore_eos": True}}
    begun = client.responses.create(
        model="chatty", input=CHAT, max_output_tokens=900, background=True, extra_body=own
    )
    time.sleep(0.2)
    assert client.responses.cancel(begun.id).status == "cancelled"
    passes = slow.passes
    time.sleep(0.1)
    assert slow.passes == passes, "steps go on after the answer was cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    slow.pause = 0.0
