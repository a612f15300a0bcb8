"""Calls and thoughts in an answer: read the same from whatever pieces, and what grammars hold it
to."""

from __future__ import annotations

import json
import random
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chats import (
    THINKING,
    calling_tokenizer,
    marked_tokenizer,
    thinking_model,
    thinking_tokenizer,
)
from tokenswift import LLM, Grammar
from tokenswift.chat import Calls, Delta, Parser, gathered, thought_of, tools_of
from tokenswift.chat.answer_grammar import answer_grammar
from tokenswift.chat.answers import special_ids
from tokenswift.chat.values import LONGEST
from tokenswift.loader.call_forms import FAMILIES, HERMES, LLAMA3, PLAIN, Family
from tokenswift.sampling.grammars import Grammars
from tokenswift.sampling.rows import allowed_tokens

NAMES = ["f", "fg"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def written(family: Family, calls: list[tuple[str, object]]) -> str:
    """Calls as an answer has them."""
    return family.spelled(calls)


class Said(NamedTuple):
    """What an answer holds, calls as their names and arguments."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    thought: str = ""


def said_in(deltas: list[Delta]) -> Said:
    """The pieces of an answer, put together."""
    text, calls, thought = gathered(deltas, "answer")
    return Said(text, tuple((call.name, call.arguments) for call in calls), thought)


def read(family: Family, text: str, cuts: list[int], parallel: bool = True) -> Said:
    """What a parser finds in a text that comes in pieces."""
    parser = Parser(family, NAMES, parallel)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    deltas = [d for a, b in zip(places, places[1:], strict=False) for d in parser.push(text[a:b])]
    return said_in([*deltas, *parser.finish()])


@given(st.sampled_from(FAMILIES), CALLS, st.lists(st.integers(0, 10_000), max_size=30))
def test_calls_in_pieces(family: Family, calls: list[tuple[str, object]], cuts: list[int]) -> None:
    read_back = read(family, written(family, calls), cuts)
    assert read_back.text == ""
    assert [(name, json.loads(arguments)) for name, arguments in read_back.calls] == calls
    first = read(family, written(family, calls), cuts, parallel=False)
    assert first.calls == read_back.calls[:1]


MARKS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {',
    '{"name": "f", "parameters": {',
    "}",
]
MARKS += [
    "```",
    "`",
    "json",
    "<|python_tag|>",
    "\n",
    " ",
    '"',
    "\\",
    "[",
    "]",
    "x",
    "<tool",
    "{",
    '{"name"',
    "; ",
]
MARKS += [" " * (LONGEST + 1), "\n" * 6 * LONGEST]


@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
    st.lists(st.integers(0, 2000)),
)
def test_anything_in_pieces(family: Family, text: str, cuts: list[int]) -> None:
    assert read(family, text, cuts) == read(family, text, [])


@pytest.mark.parametrize(
    ("family", "text", "wanted"),
    [
        (HERMES, "Sure.\n\n<tool_call>\n{", Said("Sure.\n\n<tool_call>\n{")),
        (
            HERMES,
            'Sure.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\nBye.',
            Said("Sure.\nBye.", (("f", "{}"),)),
        ),
        (
            HERMES,
            '<tool_call>\n{"name": "h", "arguments": {}}',
            Said('<tool_call>\n{"name": "h", "arguments": {}}'),
        ),
        (
            HERMES,
            '<tool_call>\n{"name": "f", "arguments": {"a": [1',
            Said("", (("f", '{"a": [1'),)),
        ),
        (HERMES, "two  \n", Said("two  \n")),
        (HERMES, ' {"name": "f", "arguments": {}}', Said("", (("f", "{}"),))),
        (
            HERMES,
            '{"name": "f", "arguments": {"a": 1}}\n{"name":"fg","arguments": {}}',
            Said("", (("f", '{"a": 1}'), ("fg", "{}"))),
        ),
        (HERMES, 'So: {"name": "f", "arguments": {}}', Said('So: {"name": "f", "arguments": {}}')),
        (HERMES, "```json\n[1]\n```", Said("```json\n[1]\n```")),
        (HERMES, '```json\n{"name": "f", "arguments": {}', Said("", (("f", "{}"),))),
        (
            LLAMA3,
            '```\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}\n```\n',
            Said("", (("f", "{}"), ("f", "{}"))),
        ),
        (
            PLAIN,
            '```json\n{\n  "name": "fg",\n  "arguments": {\n    "a": [1]\n  }\n}\n```',
            Said("", (("fg", '{\n    "a": [1]\n  }'),)),
        ),
        (
            HERMES,
            '```json\n{"name": "f", "arguments": {}}\n```\n\n```\n{"name": "fg", '
            '"arguments": {}}\n```',
            Said("", (("f", "{}"), ("fg", "{}"))),
        ),
        (HERMES, '{{"name": "f", "arguments": {"a": 1}}}', Said("", (("f", '{"a": 1}'),))),
        (HERMES, '{{"name": "f", "arguments": {"a": 1}}}}\nSo.', Said("So.", (("f", '{"a": 1}'),))),
        (
            HERMES,
            '```json\n{{"name": "f", "arguments": {}}}\n```\n{{"name": "fg", "arguments": {}}}}',
            Said("", (("f", "{}"), ("fg", "{}"))),
        ),
        (HERMES, '{{"name": "h", "arguments": {}}}', Said('{{"name": "h", "arguments": {}}}')),
        (HERMES, "{{", Said("{{")),
        (PLAIN, '{"name": "f", "arguments": {}}\n`f` says', Said("`f` says", (("f", "{}"),))),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', Said("", (("f", "{}"),))),
        (PLAIN, '{"name": "f", "arguments": {}} and so', Said("and so", (("f", "{}"),))),
        (
            PLAIN,
            ' \n{"name": "fg", "arguments": {"}": "\\"}"}}',
            Said("", (("fg", '{"}": "\\"}"}'),)),
        ),
    ],
)
def test_answers(family: Family, text: str, wanted: Said) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(family, text, cuts) == wanted


#: an object that reports what a call returned, on a line and on several
REPORT = '{"name": "f", "arguments": {"a": 1}, "result": "rain"}'
REPORTS = (REPORT, json.dumps(json.loads(REPORT), indent=2), REPORT.replace('"result"', '"output"'))
CALLED = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("family", [HERMES, PLAIN], ids=["hermes", "plain"])
def test_a_fenced_report_of_a_result_is_text(family: Family, report: str) -> None:
    """A call is a whole object of nothing else: what reports a result stays as it was written,
    also behind a call."""
    fenced = f"```json\n{report}\n```\nIt rains."
    called = (("f", '{"a": 1}'),)
    texts = {
        fenced: Said(fenced),
        f"So:\n{fenced}": Said(f"So:\n{fenced}"),
        f"[{CALLED}, {report}]": Said(f"[{CALLED}, {report}]"),
        f"{CALLED}\n{fenced}": Said(fenced, called),
        f"```json\n{CALLED}\n```\n\n{fenced}": Said(fenced, called),
        f"```json\n{CALLED}\n{report}\n```\nIt rains.": Said(fenced, called),
    }
    for text, wanted in texts.items():
        for cuts in ([], list(range(len(text)))):
            assert read(family, text, cuts) == wanted


def test_what_is_held_back_is_bounded() -> None:
    """No text waits for a call that may never come, and none takes long to read."""
    for family in FAMILIES:
        parser = Parser(family, NAMES)
        held = released = 0
        for _ in range(4 * LONGEST):
            held += 1
            released += sum(len(delta.text) for delta in parser.push(" "))
            assert held - released <= 3 * LONGEST + len(HERMES.opening)
        for opening in ('{"name": "', '{"', '{"id": "', '[{"id": "', '```json\n{"type": 5'):
            parser = Parser(family, NAMES)
            pieces = [opening, *("a" * 4 * LONGEST)]
            deltas = [delta for piece in pieces for delta in parser.push(piece)]
            assert len(deltas) > LONGEST
        begun = time.process_time()
        text = "\n" * 30_000 + "x"
        assert read(family, text, []) == Said(text)
        assert time.process_time() - begun < 2


# ---- grammars ----

LISTED = {"a": {"type": "integer"}, "b": {"enum": ["x", "}"]}}
NAMED = {"type": "function", "function": {"name": "f"}}


def first_refused(
    family: Family, text: str, choice: object = None, parallel: bool = True
) -> str | None:
    """The place in a text where the grammar of an answer refuses it, as the text before; None: it
    may be one, and end there."""
    parameters = {"properties": LISTED, "required": ["a"]}
    tools = tools_of(
        [{"type": "function", "name": name, "parameters": parameters} for name in NAMES],
        choice,
        parallel,
    )
    assert tools is not None
    tokenizer = calling_tokenizer()
    masks = Grammars(tokenizer, 260, lambda: [257]).masks(
        Grammar.lark(answer_grammar(family, tools, {})), 0
    )
    ids = [*tokenizer(text)["input_ids"], 257]
    for at, token in enumerate(ids):
        if not masks.reach(ids[:at], [token]):
            return text[:at]
    return None


CALL = {
    family: written(family, [("fg", {"a": 12, "b": "}"})]) for family in (HERMES, LLAMA3, PLAIN)
}


@pytest.mark.parametrize("family", CALL, ids=["hermes", "llama3", "plain"])
def test_forced_and_free_calls(family: Family) -> None:
    call = CALL[family]
    for choice in ("required", "auto"):
        assert first_refused(family, call, choice) is None
        assert first_refused(family, call + family.between + call, choice) is None
        place = first_refused(family, call + family.between + call, choice, parallel=False)
        assert place is not None
        assert place.rstrip() == call  # a fence could follow
    assert first_refused(family, call, NAMED) == call[: call.index("fg") + 1]
    assert first_refused(family, "Hello", "required") == ""
    assert first_refused(family, "Hello {", "auto") is None
    assert first_refused(family, call[:-1], "required") == call[:-1]  # it does not end in a call


@pytest.mark.parametrize("family", CALL, ids=["hermes", "llama3", "plain"])
def test_an_answer_that_is_nothing_but_a_call(family: Family) -> None:
    """In every family; its arguments are held to their schema. Indented or fenced it is read,
    too."""
    text = written(PLAIN, [("fg", {"a": 12, "b": "}"})]).replace("arguments", family.key)
    for old, new in (("12", '"12"'), ('"}"', '"y"'), ('"a"', '"c"')):
        wrong = text.replace(old, new)
        place = first_refused(family, wrong)
        assert place is not None, wrong
        assert wrong.startswith(place), wrong
        assert "{" in place, wrong
    fenced = f"```json\n{json.dumps(json.loads(text), indent=2)}\n```"
    for call in (text, fenced, f"{text}{family.between}{text}"):
        assert first_refused(family, call) is None
        name, arguments = read(family, call, []).calls[-1]
        assert (name, json.loads(arguments)) == ("fg", {"a": 12, "b": "}"})
    for free in (text.replace('"fg"', '"h"'), text.replace('"name"', '"tool"'), "So:" + text):
        assert first_refused(family, free) is None
        assert read(family, free, []).calls == ()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("family", CALL, ids=["hermes", "llama3", "plain"])
def test_marks_that_are_added_tokens(family: Family, choice: object, special: bool) -> None:
    """A call in the tokenizer's own tokens follows its grammar. Whatever is chosen of what may
    come, there is always more that may, although what has to come names special tokens; and the
    tokens of a call's marks."""
    tokenizer = marked_tokenizer(special)
    texts = ["a <tool_call> b", "<|im_end|>", "</tool_call>"]
    parameters = {"properties": {"a": {"maximum": 9, "type": "integer"}, "b": {"enum": texts}}}
    tools = tools_of(
        [{"type": "function", "name": "f", "parameters": parameters}], choice, parallel=False
    )
    assert tools is not None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    grammar = answer_grammar(family, tools, special_ids(tokenizer))
    grammars = Grammars(tokenizer, len(tokenizer), lambda: [end])
    ids = [*tokenizer(written(family, [("f", {"a": 1})]))["input_ids"], end]
    assert grammars.masks(Grammar.lark(grammar), 0).reach([], ids) == len(ids)
    for seed in range(0 if tools.choice == "auto" else 3):
        masks = grammars.masks(Grammar.lark(grammar), 0)
        rnd = random.Random(seed)
        chosen = list[int]()
        while end not in chosen:
            words = masks.allowed(chosen, [])
            assert words is not None
            may = allowed_tokens(words[None], len(tokenizer))[0].nonzero().squeeze(1).tolist()
            chosen.append(end if end in may else rnd.choice(may))
        read_back = read(family, tokenizer.decode(chosen[:-1]), [])
        assert [name for name, _ in read_back.calls] == ["f"]
        if family is HERMES:
            assert tokenizer.convert_tokens_to_ids("<tool_call>") in chosen


# ---- thoughts ----

QUESTION: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
SPOKEN = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
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
    ("thought", "text", "expected"),
    [
        ("may", "<think>\nhm < x\n</think>\n\nHello <think>", ("hm < x", "Hello <think>", 0)),
        ("may", "<thin air", ("", "<thin air", 0)),
        ("may", "Hello <think>a</think>", ("", "Hello <think>a</think>", 0)),
        ("may", "<think>cut </thi", ("cut </thi", "", 0)),
        ("may", "<think>\n\n</think>\n\nb", ("", "b", 0)),
        ("begun", "\nhm\n</think>\n\nb\n", ("hm", "b\n", 0)),
        ("", "<think>a</think>b", ("", "<think>a</think>b", 0)),
        ("may", f"<think>{SPOKEN}</think>ok", (SPOKEN, "ok", 0)),
        ("may", f"<think>so</think>ok\n{SPOKEN}", ("so", "ok", 1)),
    ],
)
def test_a_thought_is_told_apart(
    thought: str, text: str, expected: tuple[str, str, int], size: int
) -> None:
    """However the text comes; a call within a thought is none."""
    for tools in (None, TOOLS) if not expected[2] else (TOOLS,):
        parser = Calls(tools, HERMES, {}, thought).parser()
        deltas: list[Delta] = []
        for at in range(0, len(text), size):
            deltas += parser.push(text[at : at + size])
        parts = said_in([*deltas, *parser.finish()])
        assert (parts.thought, parts.text, len(parts.calls)) == expected


def test_a_long_thought_comes_as_it_is_written() -> None:
    parser = Parser(None, thought="may")
    assert parser.push("<think>") == []
    assert parser.push("one ") == [Delta("thought", "one")]
    assert parser.push("two") == [Delta("thought", " two")]


def test_where_a_thought_begins() -> None:
    tokenizer = calling_tokenizer(THINKING)
    plain = calling_tokenizer()
    for end, thought in (
        ("assistant:", "may"),
        ("<think>\n", "begun"),
        ("<think>\n\n</think>\n\n", ""),
    ):
        ids = tokenizer("user:Hi\n" + end)["input_ids"]
        assert thought_of(tokenizer, ids) == thought
        assert thought_of(plain, ids) == ""


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
    reply = thinking.chat(QUESTION, 40, temperature=0)
    assert (reply.reasoning, reply.text, reply.finish_reason) == ("y", "o", "eos")
    assert reply.message == {"role": "assistant", "content": "o", "reasoning_content": "y"}
    assert thinking.generate(QUESTION, 40, temperature=0).text == "<think>y</think>o"
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    bound = thinking.chat(QUESTION, 60, temperature=0, response_format=form)
    assert bound.reasoning == "y"
    assert json.loads(bound.text) == {"a": "x"}
    without = {"enable_thinking": False}
    bare = thinking.chat(
        QUESTION, 60, temperature=0, response_format=form, template_options=without
    )
    assert bare.reasoning == ""
    assert json.loads(bare.text) == {"a": "x"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    how: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    called = thinking.chat(QUESTION, 90, temperature=0, tools=tools, **how)
    assert called.reasoning == "y"
    assert [call.name for call in called.tool_calls] == ["f"]


def test_later_turns_have_thoughts_as_the_template_wants(thinking: LLM) -> None:
    message = thinking.chat(QUESTION, 40, temperature=0).message
    again = [*QUESTION, message, {"role": "user", "content": "And?"}]
    bare = [*QUESTION, {"role": "assistant", "content": "o"}, {"role": "user", "content": "And?"}]
    assert thinking.encode(again) == thinking.encode(bare)
    going_on = thinking.tokenizer.decode(thinking.encode([*QUESTION, message]))
    assert going_on.endswith("<think>\ny\n</think>\n\no")
