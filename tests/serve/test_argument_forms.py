"""Calls in tags (Qwen 3.5) and as Python writes them (LFM2), over HTTP."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletionChunk

from tests.chat.templates import LFM2, QWEN35
from tests.chats import calling_model, calling_tokenizer
from tests.serve.conftest import Start
from tests.serve.test_openai import streamed
from tokenswift import LLM

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"enum": [1, 2]},
        "is_wet": {"type": "boolean"},
    },
    "required": ["city", "days", "is_wet"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
MARKS = {QWEN35: "<tool_call>", LFM2: "<|tool_call_start|>"}


@pytest.mark.parametrize("template", [QWEN35, LFM2], ids=["qwen3.5", "lfm2"])
def test_calls_and_results(start: Start, template: str) -> None:
    tokenizer = calling_tokenizer(template, MARKS[template])
    model = calling_model(4096, tokenizer, {})
    running = start(LLM.from_model(model, tokenizer, heads=None))
    messages: list[dict[str, object]] = [{"role": "user", "content": "Umbrella?"}]
    wanted: dict[str, object] = {
        "model": running.get("/v1/models").json()["data"][0]["id"],
        "messages": messages,
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "max_tokens": 400,
        "seed": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for choice in ("required", NAMED):
        body = {**wanted, "tool_choice": choice}
        complete = running.post("/v1/chat/completions", body).json()["choices"][0]
        (call,) = complete["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert type(arguments["city"]) is str
        assert arguments["days"] in (1, 2)
        assert type(arguments["is_wet"]) is bool
        *lines, _ = streamed(running, "/v1/chat/completions", body)
        chunks = [ChatCompletionChunk.model_validate_json(line).choices[0] for line in lines]
        pieces = [one.function for chunk in chunks for one in chunk.delta.tool_calls or ()]
        spelt = "".join((piece and piece.arguments) or "" for piece in pieces)
        assert spelt == call["function"]["arguments"]
        assert len(pieces) > 3
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        again = {**wanted, "messages": [*messages, complete["message"], result]}
        answer = running.post("/v1/chat/completions", {**again, "max_tokens": 2}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
