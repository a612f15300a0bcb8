"""``LLM.chat``: calls are valid whatever the model, exact like all text, and answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from benchmarks.fetch import fetched
from tests.chats import calling_model, calling_tokenizer, chat_tokenizer
from tests.tiny import byte_model
from tokenswift import LLM, InputError, Reply, SamplingParams
from tokenswift.chat import ToolCall
from tokenswift.chat.messages import checked

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Brest", "Zürich }", 'a "b"']},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 9},
            "maxItems": 2,
        },
        "metric": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "…", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "clock"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def calling() -> Iterator[LLM]:
    """A model whose template knows tools, and which calls one."""
    with LLM.from_model(calling_model(), calling_tokenizer(), heads=None) as llm:
        yield llm


@pytest.fixture(scope="module")
def untrained() -> Iterator[LLM]:
    """Random weights, and a template that has never heard of tools."""
    with LLM.from_model(
        byte_model(max_position_embeddings=2048), chat_tokenizer(), heads=None
    ) as llm:
        yield llm


def check(reply: Reply, least: int = 1) -> None:
    """See that all calls are valid, and as many as there have to be."""
    assert len(reply.tool_calls) >= least
    assert reply.finish_reason == "tool_calls"
    schemas = {"weather": WEATHER, "clock": {"type": "object", "maxProperties": 0}}
    for call in reply.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_of_any_model(untrained: LLM, choice: Any) -> None:
    for seed in range(2):
        replies = [
            untrained.chat(
                QUESTION, 600, strategy, tools=TOOLS, tool_choice=choice, seed=seed, temperature=1.0
            )
            for strategy in ("autoregressive", "auto", "magicdec")
        ]
        tokens = {tuple(reply.generation.token_ids) for reply in replies}
        assert len(tokens) == 1, "a strategy changes tokens"
        check(replies[0])
        assert replies[0].text == ""
        assert replies[0].tool_calls == replies[1].tool_calls
        one = untrained.chat(
            QUESTION, 600, tools=TOOLS, tool_choice=choice, seed=seed, parallel_tool_calls=False
        )
        assert len(one.tool_calls) == 1
        if choice is NAMED:
            assert {call.name for call in replies[0].tool_calls} == {"weather"}
        assert replies[1].generation.metrics.steps < len(replies[1].generation.token_ids)


def test_a_loop_of_tools(calling: LLM) -> None:
    """The model calls as it likes, is told the result, and answers."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *QUESTION]
    reply = calling.chat(messages, 400, tools=TOOLS, temperature=0)
    check(reply)
    plain = calling.chat(messages, 400, "autoregressive", tools=TOOLS, temperature=0)
    assert plain.generation.token_ids == reply.generation.token_ids
    assert plain.message == reply.message
    messages.append(reply.message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "42"} for call in reply.tool_calls
    ]
    last = calling.chat(messages, 400, tools=TOOLS, temperature=0)
    assert (last.text, last.tool_calls, last.finish_reason) == ("ok", (), "eos")
    assert (
        calling.chat(messages, 400, temperature=0).text == "ok"
    )  # calls that were made need no tools


def test_encode_takes_what_chat_takes(calling: LLM) -> None:
    """No content beside calls, arguments as text, tools in either form."""
    flat = {"type": "function", **TOOLS[1]["function"]}
    called = ToolCall("call_0", "clock", "{}").form
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [called]}]
    messages.append({"role": "tool", "tool_call_id": "call_0", "content": "noon"})
    reply = calling.chat(messages, 1, tools=TOOLS)
    ids = calling.encode(messages, tools=TOOLS)
    assert calling.prefill(messages).tokens == calling.encode(messages)
    assert reply.generation.prompt_tokens == len(ids)
    assert calling.encode(messages, tools=[TOOLS[0], flat]) == ids
    with pytest.raises(InputError, match=r"tools\[0\] is \{\}.*; valid: a function"):
        calling.encode(messages, tools=[{}])


@pytest.mark.parametrize("arguments", ['{"city": "Bre', "", "[1]", "[" * 9999])
def test_arguments_that_are_no_object_are_told_as_text(arguments: str) -> None:
    """A message of ours is never refused."""
    calls = [ToolCall("call_0", "clock", "{}").form, ToolCall("call_1", "weather", arguments).form]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "?"}
    messages = [{"role": "assistant", "content": "So:", "tool_calls": calls}, result]
    answer, result = checked(messages, "messages")
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{}, arguments or {}]
    assert answer["content"] == "So:"
    assert result["name"] == "weather"


ODD: list[object] = [
    {"type": "integer", "maximum": 9, "minimum": 0, "not": {"const": 3}},
    {"type": "string", "maxLength": 1_000_000, "pattern": "^[ab]{1,5}$"},
    {},
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_keywords_that_are_not_known_are_left_out(untrained: LLM, odd: Any) -> None:
    parameters = {"type": "object", "properties": {"a": odd}, "required": ["a"]} if odd else odd
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    how: dict[str, Any] = {"tools": tools, "parallel_tool_calls": False, "temperature": 1.0}
    check(untrained.chat(QUESTION, 600, tool_choice=NAMED, seed=1, **how))
    named = {"type": "function", "function": {"name": "odd"}}
    reply = untrained.chat(QUESTION, 60, tool_choice=named, seed=1, **how)
    assert [call.name for call in reply.tool_calls] == ["odd"]
    if not odd:
        assert reply.tool_calls[0].arguments == "{}"
    elif reply.finish_reason == "tool_calls":
        assert list(json.loads(reply.tool_calls[0].arguments)) == ["a"]
    parameters = {"properties": {"a": {"type": "string", "pattern": "^(?!x)[a-z]{1,3}$"}}}
    refused = [{"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    with pytest.raises(InputError, match="cannot be compiled"):
        untrained.chat(QUESTION, 60, tools=refused)


def test_what_is_wrong_is_named(untrained: LLM) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": "weather"}, "tools is 'weather'; valid: a list of tools"),
        (
            {"tools": TOOLS, "tool_choice": "any"},
            "tool_choice is 'any'; valid: none, auto, required",
        ),
        (
            {"tools": TOOLS, "parallel_tool_calls": 1},
            "parallel_tool_calls is 1; valid: True, False",
        ),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos is True together with a grammar"),
        ({"tools": TOOLS, "speed": 1}, "'speed' is not an argument"),
    ]
    for options, message in cases:
        with pytest.raises(InputError, match=message):
            untrained.chat(QUESTION, 8, **options)
    with pytest.raises(InputError, match="messages is not a list of messages"):
        untrained.chat("Hello", 8)  # type: ignore[arg-type]


def test_a_schema_of_the_answer_beside_tools(untrained: LLM) -> None:
    """What is no call is what the schema says."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    has_called = set()
    for seed in range(8):
        sampling = SamplingParams(seed=seed, temperature=5.0, min_p=0.0, repetition_penalty=1.0)
        reply = untrained.chat(
            QUESTION, 600, sampling=sampling, tools=TOOLS, response_format=wanted
        )
        has_called.add(bool(reply.tool_calls))
        if reply.tool_calls:
            check(reply)
        else:
            jsonschema.validate(json.loads(reply.text), schema)
    assert has_called == {False, True}


@pytest.mark.slow
def test_calls_of_a_coder() -> None:
    """Qwen2.5-Coder 0.5B, whose marks are added tokens of its vocabulary."""
    with LLM(str(fetched("qwen2.5-coder-0.5b-q4_k_m")), heads=None) as llm:
        for choice in ("required", NAMED):
            how: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": 7}
            reply = llm.chat(QUESTION, 80, parallel_tool_calls=False, **how)
            check(reply)
            assert (
                llm.tokenizer.convert_tokens_to_ids("<tool_call>") == reply.generation.token_ids[0]
            )
            plain = llm.chat(QUESTION, 80, "autoregressive", parallel_tool_calls=False, **how)
            assert plain.generation.token_ids == reply.generation.token_ids
        messages: list[Any] = [
            {"role": "user", "content": "How is the weather in Brest for 2 days? Call a tool."}
        ]
        reply = llm.chat(messages, 80, tools=TOOLS, temperature=0)
        check(reply)
        assert json.loads(reply.tool_calls[0].arguments)["city"] == "Brest"
