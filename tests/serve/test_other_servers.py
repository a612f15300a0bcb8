"""Requests as clients of OpenAI's and vLLM's servers send them: taken as there, or refused in their words."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
import pytest
from openai.types import chat, completion_create_params, responses
from openai.types.responses.response_includable import ResponseIncludable

from tests.serve.conftest import Running
from tests.serve.test_openai import streamed
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


def test_usage_in_every_chunk(server: Running) -> None:
    """vLLM's ``continuous_usage_stats``, and OpenAI's ``include_obfuscation``, of which there is none."""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    body = {**HELLO, "ignore_eos": True, "stream_options": options}
    lines = streamed(server, "/v1/chat/completions", body)
    used = [json.loads(line)["usage"] for line in lines[:-1]]
    counts = [one["completion_tokens"] for one in used]
    assert counts == sorted(counts) and counts[-1] == 8
    assert all(one["prompt_tokens"] == used[-1]["prompt_tokens"] > 0 for one in used)


SCHEMA = {"type": "object", "properties": {"a": {"type": "any"}}}
SAID, KNOWS = "(Invalid type: any); valid: a", "that llguidance knows"
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
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
    (
        "chat/completions",
        {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
        "response_format",
        f"the JSON schema cannot be compiled {SAID} schema or grammar {KNOWS} (see docs/grammars.md)",
    ),
    (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}}},
        "text",
        f"the JSON schema cannot be compiled {SAID} schema or grammar {KNOWS} (see docs/grammars.md)",
    ),
    (
        "chat/completions",
        {**HELLO, "tools": [*FUNCTIONS, {"type": "function", "name": "h", "parameters": SCHEMA}]},
        "tools",
        f"the parameters of the tool 'h' cannot be compiled {SAID} JSON schema {KNOWS}",
    ),
    (
        "chat/completions",
        {**HELLO, "response_format": {"type": "json_object", "schema": {}}},
        "response_format",
        "response_format of type json_object holds more than its type; "
        "valid: the type alone, or type json_schema",
    ),
    (
        "chat/completions",
        {**HELLO, "response_format": "json"},
        "response_format",
        """response_format is 'json'; valid: {"type": "text"}, {"type": "json_object"}, """
        """{"type": "json_schema", "json_schema": {"schema": {…}}}""",
    ),
    (
        "responses",
        {"input": "x", "text": {"fromat": {"type": "json_object"}}},
        "text",
        "text.fromat is no field of a request; valid: format, verbosity; did you mean format?",
    ),
    (
        "chat/completions",
        {**HELLO, "stream": True, "stream_options": {"include_usge": True}},
        "stream_options",
        "stream_options.include_usge is no setting of this server",
    ),
    (
        "chat/completions",
        {**HELLO, "tool_choice": 1},
        "tool_choice",
        "tool_choice is 1; valid: text, or an object",
    ),
    (
        "completions",
        {**TEXT, "logit_bias": {**dict.fromkeys(map(str, range(200)), 1), "-1": 1}},
        "logit_bias",
        "logit_bias holds {'-1': 1.0}; valid: up to 16,384 token ids, each once, "
        "with a bias from -100 to 100, such as {198: -5}",
    ),
    ("completions", {**TEXT, "stop": ""}, "stop", "stop has a text of 0 characters; valid: 1 to 256"),
    ("completions", {**TEXT, "prompt": ["x"] * 9}, "prompt", "n is 1, for 9 prompts; valid: 1 to 8 in all"),
]  # fmt: skip


def test_what_a_response_may_include(server: Running) -> None:
    """What OpenAI's client names; a slip would leave out what was asked for."""
    body = {"input": "x", "max_output_tokens": 2, "include": list(get_args(ResponseIncludable))}
    assert server.post("/v1/responses", body).status_code == 200
    error = server.post("/v1/responses", {**body, "include": ["message.output_text.logprob"]}).json()["error"]
    assert error["param"] == "include" and "did you mean message.output_text.logprobs?" in error["message"]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals(server: Running, path: str, body: dict[str, Any], param: str, message: str) -> None:
    """Each names a field of the request, in words of its own interface."""
    found = server.post(f"/v1/{path}", body)
    error = found.json()["error"]
    assert (found.status_code, error["message"], error["param"]) == (400, message, param)


@pytest.mark.parametrize("strategy", ["auto", "autoregressive"])
def test_words_without_which_nothing_can_be_said(server: Running, strategy: str) -> None:
    """The client's fault, so 400: clients try again after 500, and it would fail as well."""
    body = {**HELLO, "response_format": {"type": "json_object"}, "bad_words": ["{"]}
    body["tokenswift"] = {"strategy": strategy}
    found = server.post("/v1/chat/completions", body)
    said = "bad_words leave no token that may be written; valid: fewer"
    assert (found.status_code, found.json()["error"]["message"]) == (400, said)
    *_, last = streamed(server, "/v1/chat/completions", body)
    error = json.loads(last)["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", said)


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
