"""Requests as clients of OpenAI's and vLLM's servers send them: taken as there, or refused in their
words."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types import chat, completion_create_params, responses

from tests.chats import TEMPLATE
from tests.serve.conftest import Running
from tests.serve.test_openai import streamed
from tokenswift import LLM

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 8,
    "seed": 5,
}
TEXT: dict[str, object] = {"prompt": "hello", "max_tokens": 40, "seed": 5}
RESPONSE: dict[str, object] = {"input": "Hello!", "max_output_tokens": 8}


def test_every_field_of_the_client_may_be_null(server: Running) -> None:
    for path, least, params in (
        ("chat/completions", HELLO, chat.completion_create_params.CompletionCreateParamsBase),
        ("completions", TEXT, completion_create_params.CompletionCreateParamsBase),
        ("responses", RESPONSE, responses.response_create_params.ResponseCreateParamsBase),
    ):
        body = dict.fromkeys(params.__annotations__) | least
        assert len(body) > 10
        assert server.post(f"/v1/{path}", body).status_code == 200


#: fields that ask for nothing
NOTHING: dict[str, object] = {
    "seed": -1,
    "temperature": 0,
    "stop": [""],
    "top_k": -1,
    "n": 1.0,
    "mirostat": 0,
    "functions": [],
    "suffix": "",
    "use_beam_search": False,
    "stop_token_ids": [],
}


def test_what_asks_for_nothing(server: Running, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken in silence."""
    caplog.set_level(logging.INFO, "tokenswift")
    create: Any = server.client().chat.completions.create
    usual = {"model": "chatty", "messages": HELLO["messages"], "max_tokens": 8}
    completion = create(**usual, extra_body={**NOTHING, "tokenswift": {"ignore_eos": True}})
    wanted = llm.generate(HELLO["messages"], 8, "autoregressive", temperature=0, ignore_eos=True)
    assert completion.choices[0].message.content == wanted.text
    assert completion.usage.completion_tokens == 8
    assert "left out" not in caplog.text
    assert completion.tokenswift["seed"] >= 0


def test_what_may_be_left_out(server: Running, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The answer is the same without it; the log names it."""
    caplog.set_level(logging.INFO, "tokenswift")
    many = {
        "max_token": 3,
        "wrong\nü": [1],
        "user": "me",
        **dict.fromkeys(map(str, range(50_000)), [1]),
    }
    reply = server.post("/v1/chat/completions", {**HELLO, **many})
    assert (
        "left out of a request to /v1/chat/completions: max_token, wrong\\n\\xfc, user, 0, 1, 2"
        in caplog.text
    )
    assert (
        reply.json()["choices"][0]["message"]["content"]
        == llm.chat(HELLO["messages"], 8, seed=5).text
    )


def input_message(role: str, text: str) -> dict[str, object]:
    """An item of a response's input."""
    parts = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": role, "content": parts}


#: tools that OpenAI's own servers run
HOSTED = [
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace"},
]


def test_what_agents_send(server: Running, llm: LLM) -> None:
    """Codex and its kin on /v1/responses: tools of OpenAI's own servers, and fields for them."""
    create: Any = server.client().responses.create
    function = {
        "type": "function",
        "name": "shell",
        "strict": False,
        "parameters": {"type": "object"},
    }
    items = [input_message("developer", "Be brief."), input_message("user", "Hello!")]
    response = create(
        model="chatty",
        input=items,
        tools=[*HOSTED, function],
        tool_choice="auto",
        store=False,
        parallel_tool_calls=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        reasoning={"effort": "medium", "summary": "auto"},
        text={"verbosity": "low"},
        max_output_tokens=8,
        extra_body={"client_metadata": {"a": "b"}, "seed": 5},
    )
    assert [tool.name for tool in response.tools] == ["shell"]
    alone = create(model="chatty", input=items, tools=HOSTED, max_output_tokens=8)
    assert alone.tools == []
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    assert alone.usage.input_tokens == len(llm.encode(messages))
    with pytest.raises(
        openai.BadRequestError, match="tool_choice is 'required'; valid: none, auto"
    ):
        create(model="chatty", input="Hello!", tools=HOSTED, tool_choice="required")


def test_what_an_assistant_said_before(server: Running, llm: LLM) -> None:
    """Nothing, a refusal, or a refusal as a part: servers return these, and take them back."""
    first = HELLO["messages"][0]
    last = {"role": "user", "content": "Why?"}
    for text, message in (
        ("", {"content": None, "refusal": None, "tool_calls": None, "annotations": []}),
        ("No.", {"content": None, "refusal": "No."}),
        ("No.", {"content": [{"type": "refusal", "refusal": "No."}]}),
    ):
        messages = [first, {"role": "assistant", **message}, last]
        reply = server.post("/v1/chat/completions", {**HELLO, "messages": messages})
        wanted = [first, {"role": "assistant", "content": text}, last]
        assert reply.json()["choices"][0]["message"]["content"] == llm.chat(wanted, 8, seed=5).text
        items = [first, {"type": "message", "role": "assistant", **message}, last]
        taken = server.post("/v1/responses", {"input": items, "max_output_tokens": 2})
        assert taken.json()["usage"]["input_tokens"] == reply.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("strategy", ["auto", "autoregressive"])
def test_words_without_which_nothing_can_be_said(server: Running, strategy: str) -> None:
    """The client's fault, so 400: clients try again after 500, and it would fail as well."""
    body = {**HELLO, "response_format": {"type": "json_object"}, "bad_words": ["{"]}
    body["tokenswift"] = {"strategy": strategy}
    reply = server.post("/v1/chat/completions", body)
    message = "bad_words leave no token that may be written; valid: fewer"
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)
    *_, last = streamed(server, "/v1/chat/completions", body)
    error = json.loads(last)["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", message)


# ---- chat templates ------------------------------------------------------------------------------

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
THINKS = "{% if enable_thinking is false %}quick{% else %}slow{% endif %}"


def test_options_of_the_template(
    server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's field, and OpenAI's effort where the template knows how to do without thoughts."""
    monkeypatch.setattr(llm.source.tokenizer, "chat_template", TEMPLATE + THINKS)
    chat = {"messages": CHAT["messages"], "max_tokens": 8, "seed": 5}
    options: Any = {"template_options": {"enable_thinking": False}}
    quick, slow = (llm.chat(CHAT["messages"], 8, seed=5, **how).text for how in (options, {}))
    for more, wanted in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, quick),
        ({"chat_template_kwargs": {"enable_thinking": True}}, slow),
        ({"reasoning_effort": "none"}, quick),
        ({"reasoning_effort": "high"}, slow),
    ):
        reply = server.post("/v1/chat/completions", {**chat, **more}).json()
        assert reply["choices"][0]["message"]["content"] == wanted, more
    response = {"input": "Hi", "max_output_tokens": 8, "seed": 5, "reasoning": {"effort": "none"}}
    output = server.post("/v1/responses", response).json()["output"]
    assert output[0]["content"][0]["text"] == quick
    wrong = server.post("/v1/chat/completions", {**chat, "chat_template_kwargs": {"messages": []}})
    assert wrong.status_code == 400
    assert "holds 'messages'; valid: names" in wrong.text


def test_an_answer_that_has_begun_is_continued(server: Running, llm: LLM) -> None:
    """As vLLM's ``continue_final_message``; a second turn is never begun in silence."""
    messages: list[Any] = [*CHAT["messages"], {"role": "assistant", "content": "Well, "}]
    usual = replace(llm.default_sampling(messages), seed=5)
    for continues in (None, True, False):
        option: Any = (
            {"template_options": {"continue_final_message": False}} if continues is False else {}
        )
        body = {
            "messages": messages,
            "max_tokens": 8,
            "seed": 5,
            "continue_final_message": continues,
        }
        reply = server.post("/v1/chat/completions", body).json()
        wanted = llm.generate(llm.encode(messages, **option), 8, sampling=usual)
        assert reply["choices"][0]["message"]["content"] == wanted.text
    refused = server.post("/v1/chat/completions", {**CHAT, "continue_final_message": True})
    assert refused.status_code == 400
    assert "continue_final_message is True" in refused.text
