"""Requests as clients of OpenAI's and vLLM's servers send them: taken as there, or refused in their words."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest
from openai.types import chat, completion_create_params, responses

from tests.serve.conftest import Running
from tests.serve.test_openai import streamed
from tokenswift import LLM
from tokenswift.checks import shown

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "seed": 5}
TEXT: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "seed": 5}
SAID: dict[str, Any] = {"input": "Hello!", "max_output_tokens": 8}


@pytest.mark.parametrize(
    ("path", "least", "params"),
    [
        ("chat/completions", HELLO, chat.completion_create_params.CompletionCreateParamsBase),
        ("completions", TEXT, completion_create_params.CompletionCreateParamsBase),
        ("responses", SAID, responses.response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_the_client_may_be_null(
    server: Running, path: str, least: dict[str, Any], params: Any
) -> None:
    body = dict.fromkeys(params.__annotations__) | least
    found = server.post(f"/v1/{path}", body)
    assert len(body) > 10 and found.status_code == 200 and "x-left-out" not in found.headers


#: fields that ask for nothing
NOTHING: dict[str, Any] = {
    "max_tokens": -1, "seed": -1, "top_p": 0, "temperature": 0, "stop": [""], "top_k": -1, "n": 1.0,
    "skip_special_tokens": True, "typical_p": 1, "mirostat": 0, "cache_prompt": True, "chat_id": "c-1",
    "user": "me", "metadata": {"a": "b"}, "best_of": 1, "modalities": ["text"], "service_tier": "auto",
    "functions": [], "suffix": "", "use_beam_search": False, "store": True,
}  # fmt: skip


def test_what_asks_for_nothing(server: Running, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken in silence, and -1 is all that may be written."""
    caplog.set_level(logging.INFO, "tokenswift")
    create: Any = server.client().chat.completions.with_raw_response.create
    usual = {"model": "chatty", "messages": HELLO["messages"]}
    own = {"tokenswift": {"ignore_eos": True}}
    more = {name: NOTHING[name] for name in NOTHING if name not in usual}
    sent = create(**usual, extra_body=more | own)
    rest = 1024 - len(llm.encode(HELLO["messages"]))
    wanted = llm.generate(HELLO["messages"], rest, "autoregressive", temperature=0, ignore_eos=True)
    found = sent.parse()
    assert found.choices[0].message.content == wanted.text and found.usage.completion_tokens == rest
    assert "x-left-out" not in sent.headers and "left out" not in caplog.text
    assert found.tokenswift["seed"] >= 0
    found = create(**usual, max_tokens=8.0, top_p=0, stop="", seed=5).parse()
    wanted = llm.generate(HELLO["messages"], 8, "autoregressive", temperature=0)
    assert found.choices[0].message.content == wanted.text, "no mass at all: the likeliest token"


def test_what_may_be_left_out(server: Running, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The answer is the same without it; the log and a header name it."""
    caplog.set_level(logging.INFO, "tokenswift")
    fields = {"typical_p": 0.9, "max_token": 3, "wrong\nü": [1], "best_of": 4, "verbosity": "low"}
    more = {"stream_options": {"include_usge": True}, "structured_outputs": {"disable_fallback": True}}
    for stream in (False, True):
        found = server.post("/v1/chat/completions", {**HELLO, **fields, **more, "stream": stream})
        named = r"typical_p, max_token, wrong\n\xfc, best_of, verbosity, stream_options.include_usge, "
        named += "structured_outputs.disable_fallback"
        assert found.status_code == 200, found.text
        assert found.headers["x-left-out"] == named
        assert f"left out of a request to /v1/chat/completions: {named}" in caplog.text
        caplog.clear()
        if not stream:
            text = found.json()["choices"][0]["message"]["content"]
            assert text == llm.chat(HELLO["messages"], 8, seed=5).text


def test_what_agents_send(server: Running, llm: LLM) -> None:
    """Codex and its kin on /v1/responses: tools of OpenAI's own servers, and fields for them."""
    create: Any = server.client().responses.with_raw_response.create
    function = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}}
    hosted = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "namespace"}]
    said = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}
    sent = create(
        model="chatty", input=[said, asked], tools=[*hosted, function], tool_choice="auto", store=False,
        parallel_tool_calls=False, include=["reasoning.encrypted_content"], prompt_cache_key="k",
        reasoning={"effort": "medium", "summary": "auto"}, text={"verbosity": "low"}, max_output_tokens=8,
        extra_body={"client_metadata": {"a": "b"}, "seed": 5},
    )  # fmt: skip
    named = "include, tools[0] (web_search), tools[1] (custom), tools[2] (namespace), text.verbosity"
    assert sent.headers["x-left-out"] == named
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    found = sent.parse()
    assert [tool.name for tool in found.tools] == ["shell"]
    assert found.usage.input_tokens > len(llm.encode(messages)), "the function is told"
    alone = create(model="chatty", input=[said, asked], tools=hosted, max_output_tokens=8).parse()
    assert alone.tools == [] and alone.usage.input_tokens == len(llm.encode(messages))
    with pytest.raises(openai.BadRequestError, match="tool_choice is 'required' without tools"):
        create(model="chatty", input="Hello!", tools=hosted, tool_choice="required")


def test_what_clients_of_vllm_send(server: Running, llm: LLM) -> None:
    """Its benchmarks ask for ``ignore_eos``."""
    (end,) = llm.source.codec("</s>", add_special_tokens=False)["input_ids"]
    body: dict[str, Any] = {**TEXT, "top_k": -1, "min_p": 0, "logit_bias": {str(end): 6}}
    usual: Any = {"seed": 5, "top_k": 0, "min_p": 0, "logit_bias": {end: 6}}
    for ignore_eos in (False, True):
        found = server.post("/v1/completions", {**body, "ignore_eos": ignore_eos}).json()
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
WRONG, KNOWS = "(Invalid type: any); valid: a", "that llguidance knows"
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
    (
        "completions",
        {**TEXT, "use_beam_search": True},
        "use_beam_search",
        "use_beam_search is not supported; valid: leave it out",
    ),
    ("completions", {**TEXT, "suffix": "."}, "suffix", "suffix is not supported; valid: leave it out"),
    (
        "responses",
        {**SAID, "conversation": "conv_1"},
        "conversation",
        "conversation is not supported; valid: leave it out",
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
        f"the JSON schema cannot be compiled {WRONG} schema or grammar {KNOWS} (see docs/grammars.md)",
    ),
    (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}}},
        "text",
        f"the JSON schema cannot be compiled {WRONG} schema or grammar {KNOWS} (see docs/grammars.md)",
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
    (
        "completions",
        {**TEXT, "stop": "x" * 257},
        "stop",
        f"stop[0] is {shown('x' * 257)}; valid: at most 256 characters",
    ),
    ("completions", {**TEXT, "prompt": ["x"] * 9}, "prompt", "n is 1, for 9 prompts; valid: 1 to 8 in all"),
]  # fmt: skip


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
    assert said == "GET is not a method of '/v1/chat/completions'; valid: POST"
    for path in ("/", "/health", "/v1/models"):
        found = httpx.head(f"{server.url}{path}", timeout=60)
        assert found.status_code == 200 and not found.content
