"""Calls of Qwen2.5-Coder 0.5B, whose marks are added tokens of its vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.fetch import fetched
from tests.chat.test_chat import ASKED, NAMED, TOOLS, check
from tokenswift import LLM


@pytest.mark.slow
def test_calls_of_a_coder() -> None:
    with LLM(str(fetched("qwen2.5-coder-0.5b-q4_k_m")), heads=None) as llm:
        for choice in ("required", NAMED):
            how: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": 7}
            reply = llm.chat(ASKED, 80, parallel_tool_calls=False, **how)
            check(reply)
            assert llm.tokenizer.convert_tokens_to_ids("<tool_call>") == reply.generation.token_ids[0]
            plain = llm.chat(ASKED, 80, "autoregressive", parallel_tool_calls=False, **how)
            assert plain.generation.token_ids == reply.generation.token_ids
        asked: list[Any] = [
            {"role": "user", "content": "How is the weather in Brest for 2 days? Call a tool."}
        ]
        reply = llm.chat(asked, 80, tools=TOOLS, temperature=0)
        check(reply)
        assert json.loads(reply.tool_calls[0].arguments)["city"] == "Brest"
