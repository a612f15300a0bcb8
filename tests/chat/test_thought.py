"""Thoughts before an answer: told apart, let be by grammars, and given to the template of later turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chats import THINKING, calling_tokenizer, thinking_model, thinking_tokenizer
from tokenswift import LLM, Grammar
from tokenswift.chat.calls import Calls, gathered
from tokenswift.chat.parser import Delta, Parser
from tokenswift.chat.tools import HERMES, thought_of, tools_of
from tokenswift.sampling.masks import Grammars

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = tools_of([{"type": "function", "function": {"name": "f"}}])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def thinking() -> LLM:
    return LLM.from_model(thinking_model(), thinking_tokenizer(), heads=None)


@pytest.mark.parametrize("size", [1, 5, 200])
@pytest.mark.parametrize(
    ("thought", "text", "found"),
    [
        ("may", "<think>\nhm < x\n</think>\n\nHello <think>", ("hm < x", "Hello <think>", 0)),
        ("may", "<thin air", ("", "<thin air", 0)),
        ("may", "Hello <think>a</think>", ("", "Hello <think>a</think>", 0)),
        ("may", "<think>cut </thi", ("cut </thi", "", 0)),
        ("may", "<think>\n\n</think>\n\nb", ("", "b", 0)),
        ("begun", "\nhm\n</think>\n\nb\n", ("hm", "b\n", 0)),
        ("", "<think>a</think>b", ("", "<think>a</think>b", 0)),
        ("may", f"<think>{CALL}</think>ok", (CALL, "ok", 0)),
        ("may", f"<think>so</think>ok\n{CALL}", ("so", "ok", 1)),
    ],
)
def test_a_thought_is_told_apart(thought: str, text: str, found: tuple[str, str, int], size: int) -> None:
    """However the text comes; a call within a thought is none."""
    for tools in (None, TOOLS) if not found[2] else (TOOLS,):
        parser = Calls(tools, HERMES, (), thought).parser()
        deltas: list[Delta] = []
        for at in range(0, len(text), size):
            deltas += parser.push(text[at : at + size])
        said = gathered([*deltas, *parser.finish()])
        assert (said.thought, said.text, len(said.calls)) == found


def test_a_long_thought_comes_as_it_is_written() -> None:
    parser = Parser(None, thought="may")
    assert parser.push("<think>") == [] and parser.push("one ") == [Delta("thought", "one")]
    assert parser.push("two") == [Delta("thought", " two")]


def test_where_a_thought_begins() -> None:
    tokenizer, plain = calling_tokenizer(THINKING), calling_tokenizer()
    for end, thought in (("assistant:", "may"), ("<think>\n", "begun"), ("<think>\n\n</think>\n\n", "")):
        ids = tokenizer("user:Hi\n" + end)["input_ids"]
        assert thought_of(tokenizer, ids) == thought and thought_of(plain, ids) == ""


GRAMMARS = [
    Grammar.json_schema(SCHEMA),
    Grammar.regex(r'\{"a": "x"\}'),
    Grammar.lark('start: "{" REST\nREST: /"a": "x"\\}/'),
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("mark", ["</think>", "<tool_call>"])
def test_a_grammar_holds_behind_the_thought(grammar: Grammar, mark: str) -> None:
    """Of any kind, and whether the vocabulary has a token for the mark or not."""
    tokenizer = calling_tokenizer(THINKING, mark)
    grammars = Grammars(tokenizer, 260, lambda: [257])
    before = {"may": "<think>y {</think>\n\n", "begun": "so</think>"}
    for thought, text in (("", ""), ("may", ""), *before.items()):
        held = Grammar(grammar.kind, grammar.text, thought)
        assert Grammar.of(held.record()) == held
        ids = tokenizer(text + '{"a": "x"}', add_special_tokens=False)["input_ids"]
        masks = grammars.masks(held, 0)
        for at, token in enumerate([*ids, 257]):
            assert masks.reach(ids[:at], [token]), (thought, text, at)


def test_a_chat_of_a_model_that_thinks(thinking: LLM) -> None:
    reply = thinking.chat(ASKED, 40, temperature=0)
    assert (reply.reasoning, reply.text, reply.finish_reason) == ("y", "o", "eos")
    assert reply.message == {"role": "assistant", "content": "o", "reasoning_content": "y"}
    assert thinking.generate(ASKED, 40, temperature=0).text == "<think>y</think>o"
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    bound = thinking.chat(ASKED, 60, temperature=0, response_format=form)
    assert bound.reasoning == "y" and json.loads(bound.text) == {"a": "x"}
    without = {"enable_thinking": False}
    bare = thinking.chat(ASKED, 60, temperature=0, response_format=form, template_options=without)
    assert bare.reasoning == "" and json.loads(bare.text) == {"a": "x"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    how: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    called = thinking.chat(ASKED, 90, temperature=0, tools=tools, **how)
    assert called.reasoning == "y" and [call.name for call in called.tool_calls] == ["f"]


def test_later_turns_have_thoughts_as_the_template_wants(thinking: LLM) -> None:
    message = thinking.chat(ASKED, 40, temperature=0).message
    again = [*ASKED, message, {"role": "user", "content": "And?"}]
    bare = [*ASKED, {"role": "assistant", "content": "o"}, {"role": "user", "content": "And?"}]
    assert thinking.encode(again) == thinking.encode(bare)
    going_on = thinking.source.codec.decode(thinking.encode([*ASKED, message]))
    assert going_on.endswith("<think>\ny\n</think>\n\no")
