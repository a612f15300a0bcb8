"""Requests as clients of OpenAI's and vLLM's servers send them: taken as there, or refused in their words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import chat, completion_create_params, responses

from tests.serve.conftest import Running
from tokenswift import LLM
from tokenswift.serve.known import NO_MATTER, WITHOUT
from tokenswift.serve.schemas import KINDS

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "seed": 5}
TEXT: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "seed": 5}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("chat", chat.completion_create_params.CompletionCreateParamsBase),
        ("completion", completion_create_params.CompletionCreateParamsBase),
        ("response", responses.response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_the_client_is_known(kind: str, params: Any) -> None:
    """It is served, does nothing, or is refused by its value: a client that sends null is not."""
    unknown = params.__annotations__.keys() - KINDS[kind][0].model_fields.keys() - WITHOUT.keys()
    assert len(params.__annotations__) > 10 and unknown <= {*NO_MATTER}


def test_what_clients_of_vllm_send(server: Running, llm: LLM) -> None:
    """Its benchmarks ask for ``ignore_eos``; others name fields that ask for nothing."""
    (end,) = llm.source.codec("</s>", add_special_tokens=False)["input_ids"]
    body: dict[str, Any] = {**TEXT, "top_k": -1, "min_p": 0, "logit_bias": {str(end): 6}}
    nothing = {"use_beam_search": False, "add_generation_prompt": True, "length_penalty": 1.0}
    usual: Any = {"seed": 5, "top_k": 0, "min_p": 0, "logit_bias": {end: 6}}
    for ignore_eos in (False, True):
        found = server.post("/v1/completions", {**body, **nothing, "ignore_eos": ignore_eos}).json()
        wanted = llm.generate("hello", 40, "autoregressive", ignore_eos=ignore_eos, **usual)
        assert found["choices"][0]["text"] == wanted.text
        assert (found["usage"]["completion_tokens"] == 40) is ignore_eos


def test_what_an_assistant_said_before(server: Running, llm: LLM) -> None:
    """Nothing, a refusal, or a refusal as a part: servers return these, and take them back."""
    first, last = HELLO["messages"][0], {"role": "user", "content": "Why?"}
    for text, message in (
        ("", {"content": None, "refusal": None, "tool_calls": None, "annotations": []}),
        ("No.", {"content": None, "refusal": "No."}),
        ("No.", {"content": [{"type": "refusal", "refusal": "No."}]}),
    ):
        messages = [first, {"role": "assistant", **message}, last]
        found = server.post("/v1/chat/completions", {**HELLO, "messages": messages})
        wanted = [first, {"role": "assistant", "content": text}, last]
        assert found.json()["choices"][0]["message"]["content"] == llm.chat(wanted, 8, seed=5).text
        items = [first, {"type": "message", "role": "assistant", **message}, last]
        taken = server.post("/v1/responses", {"input": items, "max_output_tokens": 2})
        assert taken.json()["usage"]["input_tokens"] == found.json()["usage"]["prompt_tokens"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "chat/completions",
        {"messages": [{"rol": "system", "content": "Be brief."}, *HELLO["messages"]]},
        "messages",
        "messages[0].role is missing; valid: system, developer, user, assistant, tool",
    ),
    (
        "responses",
        {"input": [{"content": "Hello!"}]},
        "input",
        "input[0].role is missing; valid: system, developer, user, assistant, tool",
    ),
    ("completions", {**TEXT, "length_penalty": 2}, "length_penalty", "length_penalty is 2; valid here: 1"),
    (
        "chat/completions",
        {**HELLO, "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs",
        "chat_template_kwargs is {'enable_thinking': False}; valid here: {}",
    ),
    (
        "completions",
        {**TEXT, "ignore_eos": True, "guided_regex": "a+"},
        "ignore_eos",
        "ignore_eos is True beside a grammar; valid: one of the two",
    ),
    (
        "chat/completions",
        {**HELLO, "max_completion_tokens": 9},
        "max_tokens",
        "max_tokens is 8, max_completion_tokens 9; valid: one of them, or both alike",
    ),
    (
        "chat/completions",
        {**HELLO, "min_tokens": 9},
        "min_tokens",
        "min_tokens is 9, max_tokens 8; valid: up to 8, or a larger max_tokens",
    ),
    (
        "responses",
        {"input": "x", "min_tokens": 2000},
        "min_tokens",
        "min_tokens is 2000, max_output_tokens 1,005; valid: up to 1,005, or a larger max_output_tokens",
    ),
    (
        "completions",
        {**TEXT, "stop_token_ids": [1, 260, -1]},
        "stop_token_ids",
        "stop_token_ids holds 260; valid: 0 to 259, the model's vocabulary",
    ),
    ("completions", {**TEXT, "stop": ""}, "stop", "stop has a text of 0 characters; valid: 1 to 256"),
    ("completions", {**TEXT, "prompt": ["x"] * 9}, "prompt", "n is 1, for 9 prompts; valid: 1 to 8 in all"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals(server: Running, path: str, body: dict[str, Any], param: str, message: str) -> None:
    """Each names a field of the request, in words of its own interface."""
    found = server.post(f"/v1/{path}", body)
    error = found.json()["error"]
    assert (found.status_code, error["message"], error["param"]) == (400, message, param)


def test_paths_and_methods(server: Running) -> None:
    """A base URL without /v1 is told so; who only asks whether the server is there gets an answer."""
    said = server.post("/chat/completions", HELLO).json()["error"]["message"]
    assert said.startswith("there is no path '/chat/completions'; valid: /v1/chat/completions, ")
    assert said.endswith("; did you mean /v1/chat/completions?")
    said = server.get("/v1/chat/completions").json()["error"]["message"]
    assert said == "GET is no method of '/v1/chat/completions'; valid: POST"
    for path in ("/", "/health", "/v1/models"):
        found = httpx.head(f"{server.url}{path}", timeout=60)
        assert found.status_code == 200 and not found.content
