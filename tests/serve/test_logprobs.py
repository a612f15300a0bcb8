"""Log-probabilities, several texts, several prompts and echoes, as OpenAI's client asks for them:
those of plain decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.serve.conftest import Running
from tests.serve.test_openai import streamed
from tokenswift import LLM

CHAT: list[Any] = [{"role": "user", "content": "Hello!"}]
NEW = 24
PROMPTS = ("hello", "so long", "né")


def chunks_of(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    return [json.loads(line) for line in streamed(server, path, body)[:-1]]


def texts_of(chunks: list[dict[str, Any]], field: str = "") -> dict[int, str]:
    """The texts of a stream, by their numbers."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or "" if field == "delta" else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


# ---- log-probabilities ---------------------------------------------------------------------------


def test_a_chats_logprobs_are_those_of_plain_decoding(server: Running, llm: LLM) -> None:
    completion = server.client().chat.completions.create(
        model="chatty", messages=CHAT, max_tokens=NEW, seed=5, logprobs=True, top_logprobs=3
    )
    ChatCompletion.model_validate(completion.to_dict(), strict=True)
    plain = llm.generate(CHAT, NEW, "autoregressive", seed=5, logprobs=3)
    assert completion.choices[0].logprobs is not None
    content = completion.choices[0].logprobs.content or []
    assert [one.logprob for one in content] == [record.logprob for record in plain.logprobs]
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [
        [value for _, value in record.top] for record in plain.logprobs
    ]
    data = b"".join(bytes(one.bytes or []) for one in content)
    assert data.decode(errors="ignore").startswith(plain.text.replace("\ufffd", "")[:1])
    assert len(content) == completion.usage.completion_tokens  # type: ignore[union-attr]


def test_logprobs_are_those_of_the_stream(server: Running) -> None:
    body: dict[str, object] = {"max_tokens": NEW, "seed": 5}
    chat = {**body, "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    complete = server.post("/v1/chat/completions", chat).json()["choices"][0]
    chunks = chunks_of(server, "/v1/chat/completions", chat)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    content = [one for part in parts if part for one in part["content"]]
    assert content == complete["logprobs"]["content"]
    text = {**body, "prompt": "hello", "logprobs": 2, "echo": True}
    complete = server.post("/v1/completions", text).json()["choices"][0]
    chunks = chunks_of(server, "/v1/completions", text)
    assert texts_of(chunks)[0] == complete["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    for name, values in complete["logprobs"].items():
        assert [value for part in parts if part for value in part[name]] == values


def test_a_token_of_half_a_letter_is_told_by_its_bytes(server: Running) -> None:
    """The prompt's é is two tokens of this tokenizer."""
    body = {"prompt": "né", "max_tokens": 0, "echo": True, "logprobs": 0}
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "n", r"bytes:\xc3", r"bytes:\xa9"]
    assert logprobs["text_offset"] == [0, 0, 1, 1]


def test_an_echo_has_the_prompts_own_logprobs(server: Running, llm: LLM) -> None:
    """What evaluation harnesses ask for: how likely a text is behind another one."""
    ids = llm.encode("hello, world")
    for prompt in ("hello, world", ids, [ids]):
        completion: Any = server.client().completions.create(
            model="chatty", prompt=prompt, max_tokens=1, logprobs=2, echo=True, temperature=0
        )
        (choice,) = completion.choices
        expected = llm.generate(ids, 1, prompt_logprobs=2, temperature=0, logprobs=2)
        records = [*expected.prompt_logprobs, *expected.logprobs]
        values = [None if record is None else record.logprob for record in records]
        assert choice.logprobs.token_logprobs == values
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.tokens[1:-1] == list("hello, world")
        assert choice.text.endswith("hello, world" + expected.text)
        begin = len(choice.text) - len("hello, world" + expected.text)
        assert choice.logprobs.text_offset[1:-1] == list(range(begin, begin + 12))


def test_an_echo_without_new_tokens(server: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}
    completion = server.post("/v1/completions", body).json()
    assert completion["choices"][0]["text"] == "hello"
    assert completion["usage"]["completion_tokens"] == 0
    assert completion["choices"][0]["finish_reason"] == "length"
    assert len(completion["choices"][0]["logprobs"]["tokens"]) == 6
    chunks = chunks_of(server, "/v1/completions", body)
    assert texts_of(chunks) == {0: "hello"}
    plain = server.post("/v1/completions", {**body, "logprobs": None, "max_tokens": 3, "seed": 1})
    assert plain.json()["choices"][0]["text"].startswith("hello")


# ---- several texts -------------------------------------------------------------------------------


def test_each_text_of_a_prompt_is_that_of_the_next_seed(server: Running, llm: LLM) -> None:
    results = [llm.generate(CHAT, NEW, "autoregressive", seed=5 + i) for i in range(3)]
    alone = [result.text for result in results]
    body = {"messages": CHAT, "max_tokens": NEW, "seed": 5, "n": 3}
    completion = server.client().chat.completions.create(model="chatty", **body)  # type: ignore[call-overload]
    assert [choice.message.content for choice in completion.choices] == alone
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert [choice.tokenswift["seed"] for choice in completion.choices] == [5, 6, 7]
    assert completion.usage.prompt_tokens == len(llm.encode(CHAT))
    assert completion.usage.completion_tokens == sum(len(one.token_ids) for one in results)
    chunks = chunks_of(server, "/v1/chat/completions", body)
    assert texts_of(chunks, "delta") == dict(enumerate(alone))
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert sorted(reason for reason in reasons if reason) == sorted(
        "stop" if result.finish_reason == "eos" else "length" for result in results
    )


def test_texts_without_a_seed_differ(server: Running) -> None:
    body = {"prompt": "hello", "max_tokens": NEW, "n": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert choices[0]["text"] != choices[1]["text"]
    first, second = (choice["tokenswift"]["seed"] for choice in choices)
    assert second == first + 1


def test_each_of_several_prompts_is_gone_on_from(server: Running, llm: LLM) -> None:
    """In order, each with the seed; texts or ids."""
    alone = [
        llm.generate(prompt, NEW, "autoregressive", seed=5 + i).text
        for prompt in PROMPTS
        for i in range(2)
    ]
    ids = [llm.encode(prompt) for prompt in PROMPTS]
    for prompts in (list(PROMPTS), ids):
        body = {"prompt": prompts, "max_tokens": NEW, "seed": 5, "n": 2}
        completion = server.post("/v1/completions", body).json()
        assert [choice["text"] for choice in completion["choices"]] == alone
        assert [choice["index"] for choice in completion["choices"]] == list(range(6))
        assert completion["usage"]["prompt_tokens"] == sum(map(len, ids))
        chunks = chunks_of(server, "/v1/completions", body)
        assert texts_of(chunks) == dict(enumerate(alone))


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("completions", {"prompt": "x", "n": 0}, "n is 0; valid: an integer from 1 to 128"),
    ("completions", {"prompt": "x", "n": 129}, "n is 129; valid: an integer from 1 to 128"),
    (
        "completions",
        {"prompt": ["x", "y", "z"], "n": 50},
        "n is 50, with 3 prompts: 150 texts; valid: up to 128 in one request",
    ),
    ("completions", {"prompt": ["x", []]}, "prompt[1] is empty; valid: at least one token"),
    (
        "completions",
        {"prompt": "x", "max_tokens": 0, "logprobs": 1},
        "max_tokens is 0; valid: an integer from 1 to ",
    ),
    (
        "completions",
        {"prompt": "x", "logprobs": 21},
        "logprobs is 21; valid: an integer from 0 to 20, or None",
    ),
    ("chat/completions", {"n": -1}, "n is -1; valid: an integer from 1 to 128"),
    (
        "chat/completions",
        {"top_logprobs": 2},
        "top_logprobs is 2 without logprobs; valid: together with logprobs true",
    ),
    (
        "chat/completions",
        {"logprobs": True, "top_logprobs": 30},
        "top_logprobs is 30; valid: an integer from 0 to 20",
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_too_many_are_refused(
    server: Running, path: str, body: dict[str, Any], message: str
) -> None:
    least = {} if path == "completions" else {"messages": CHAT}
    reply = server.post(f"/v1/{path}", {**least, **body})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["message"].startswith(message)
    assert error["param"] == message.split()[0].partition("[")[0]


def test_more_prompts_than_a_request_may_have(server: Running) -> None:
    reply = server.post("/v1/completions", {"prompt": ["x"] * 129, "max_tokens": 1})
    assert reply.status_code == 400
    assert "prompt" in reply.json()["error"]["message"]


def test_many_texts_wait_for_a_short_queue(start: Any, llm: LLM) -> None:
    """One request does not fill the queue of others, and is answered in full."""
    server = start(max_concurrent=2, queue=1)
    body = {"prompt": ["hello"] * 12, "max_tokens": 4, "seed": 5}
    choices = server.post("/v1/completions", body).json()["choices"]
    wanted = llm.generate("hello", 4, "autoregressive", seed=5).text
    assert [choice["text"] for choice in choices] == [wanted] * 12
