"""Calls are read the same from whatever pieces an answer comes in, and what is no call is text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenswift.chat.calls import Said, gathered
from tokenswift.chat.parser import LONGEST, Parser
from tokenswift.chat.tools import HERMES, LLAMA3, PLAIN, Family

FAMILIES = (HERMES, LLAMA3, PLAIN)
NAMES = ["f", "fg"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip


def read(family: Family, text: str, cuts: list[int], parallel: bool = True) -> Said:
    """What a parser finds in a text that comes in pieces."""
    parser = Parser(family, NAMES, parallel)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    found = [d for a, b in zip(places, places[1:], strict=False) for d in parser.push(text[a:b])]
    return gathered([*found, *parser.finish()])


@given(st.sampled_from(FAMILIES), CALLS, st.lists(st.integers(0, 10_000), max_size=30))
def test_calls_in_pieces(family: Family, calls: list[tuple[str, Any]], cuts: list[int]) -> None:
    said = read(family, family.written(calls), cuts)
    assert said.text == ""
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == calls
    first = read(family, family.written(calls), cuts, parallel=False)
    assert first.calls == said.calls[:1]


MARKS = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', '{"name": "f", "parameters": {', "}"]
MARKS += ["```", "`", "json", "<|python_tag|>", "\n", " ", '"', "\\", "[", "]", "x", "<tool", '{"name"', "; "]


@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
    st.lists(st.integers(0, 200)),
)
def test_anything_in_pieces(family: Family, text: str, cuts: list[int]) -> None:
    assert read(family, text, cuts) == read(family, text, [])


@pytest.mark.parametrize(
    ("family", "text", "wanted"),
    [
        (HERMES, "Sure.\n\n<tool_call>\n{", Said("Sure.\n\n<tool_call>\n{")),
        (HERMES, 'Sure.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\nBye.',
         Said("Sure.Bye.", (("f", "{}"),))),
        (HERMES, '<tool_call>\n{"name": "h", "arguments": {}}',
         Said('<tool_call>\n{"name": "h", "arguments": {}}')),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": [1', Said("", (("f", '{"a": [1'),))),
        (HERMES, "two  \n", Said("two  \n")),
        (HERMES, ' {"name": "f", "arguments": {}}', Said("", (("f", "{}"),))),
        (HERMES, '{"name": "f", "arguments": {"a": 1}}\n{"name":"fg","arguments": {}}',
         Said("", (("f", '{"a": 1}'), ("fg", "{}")))),
        (HERMES, 'So: {"name": "f", "arguments": {}}', Said('So: {"name": "f", "arguments": {}}')),
        (HERMES, "```json\n[1]\n```", Said("```json\n[1]\n```")),
        (HERMES, '```json\n{"name": "f", "arguments": {}', Said("", (("f", "{}"),))),
        (LLAMA3, '```\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}\n```\n',
         Said("", (("f", "{}"), ("f", "{}")))),
        (PLAIN, '```json\n{\n  "name": "fg",\n  "arguments": {\n    "a": [1]\n  }\n}\n```',
         Said("", (("fg", '{\n    "a": [1]\n  }'),))),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', Said("", (("f", "{}"),))),
        (PLAIN, '{"name": "f", "arguments": {}} and so', Said("and so", (("f", "{}"),))),
        (PLAIN, ' \n{"name": "fg", "arguments": {"}": "\\"}"}}', Said("", (("fg", '{"}": "\\"}"}'),))),
    ],
)  # fmt: skip
def test_answers(family: Family, text: str, wanted: Said) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(family, text, cuts) == wanted


def test_what_is_held_back_is_bounded() -> None:
    """No text waits for a call that may never come."""
    for family in FAMILIES:
        parser = Parser(family, NAMES)
        held = told = 0
        for _ in range(4 * LONGEST):
            held += 1
            told += sum(len(delta.text) for delta in parser.push(" "))
            assert held - told <= LONGEST + len(HERMES.opening)
