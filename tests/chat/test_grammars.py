"""What an answer is held to: forced calls from the first token on, else from where a call begins."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.chat.test_parser import NAMES, read
from tests.chats import calling_tokenizer, marked_tokenizer
from tokenswift.chat.calls import Calls
from tokenswift.chat.tools import HERMES, LLAMA3, PLAIN, Family, tools_of
from tokenswift.grammar import Grammar
from tokenswift.sampling.masks import Grammars, special_tokens
from tokenswift.sampling.ranking import allowed_tokens

LISTED = {"a": {"type": "integer"}, "b": {"enum": ["x", "}"]}}
NAMED = {"type": "function", "function": {"name": "f"}}


def first_refused(family: Family, text: str, choice: Any = None, parallel: bool = True) -> str | None:
    """The place in a text where the grammar of an answer refuses it, as the text before; None: it may be one,
    and end there."""
    parameters = {"properties": LISTED, "required": ["a"]}
    tools = tools_of(
        [{"type": "function", "name": name, "parameters": parameters} for name in NAMES], choice, parallel
    )
    assert tools is not None
    tokenizer = calling_tokenizer()
    masks = Grammars(tokenizer, 260, lambda: [257]).masks(Grammar.lark(Calls(tools, family).grammar()), 0)
    ids = [*tokenizer(text)["input_ids"], 257]
    for at, token in enumerate(ids):
        if not masks.reach(ids[:at], [token]):
            return text[:at]
    return None


CALL = {family: family.written([("fg", {"a": 12, "b": "}"})]) for family in (HERMES, LLAMA3, PLAIN)}


@pytest.mark.parametrize("family", CALL, ids=lambda family: family.name)
def test_forced_and_free_calls(family: Family) -> None:
    call = CALL[family]
    for choice in ("required", "auto"):
        assert first_refused(family, call, choice) is None
        assert first_refused(family, call + family.between + call, choice) is None
        place = first_refused(family, call + family.between + call, choice, parallel=False)
        assert place is not None and place.rstrip() == call  # a fence could follow
    assert first_refused(family, call, NAMED) == call[: call.index("fg") + 1]
    assert first_refused(family, "Hello", "required") == ""
    assert first_refused(family, "Hello {", "auto") is None
    assert first_refused(family, call[:-1], "required") == call[:-1]  # it does not end in a call


INDENTED = '{\n  "name": "fg",\n  "KEY": {\n    "a": 12,\n    "b": "}"\n  }\n}'


@pytest.mark.parametrize("family", CALL, ids=lambda family: family.name)
@pytest.mark.parametrize("fence", ["", "```json\n"])
def test_an_answer_that_is_nothing_but_a_call(family: Family, fence: str) -> None:
    """Bare or fenced, indented or not, in every family; its arguments are held to their schema."""
    for call in (PLAIN.written([("fg", {"a": 12, "b": "}"})]).replace("arguments", "KEY"), INDENTED):
        call = call.replace("KEY", family.key)
        text = fence + call + ("\n```" if fence else "")
        assert first_refused(family, text) is None
        ((name, arguments),) = read(family, text, []).calls
        assert (name, json.loads(arguments)) == ("fg", {"a": 12, "b": "}"})
        for old, new in (("12", '"12"'), ('"}"', '"y"'), ('"a"', '"c"')):
            wrong = text.replace(old, new)
            place = first_refused(family, wrong)
            assert place is not None and wrong.startswith(place) and "{" in place, wrong
        for free in (text.replace('"fg"', '"h"'), text.replace('"name"', '"tool"'), "So:" + text):
            assert first_refused(family, free) is None and read(family, free, []).calls == ()
        again = read(family, fence + f"{call}\n{call}", [])
        assert len(again.calls) == 2 and first_refused(family, fence + f"{call}\n{call}") is None


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("family", CALL, ids=lambda family: family.name)
def test_marks_that_are_added_tokens(family: Family, choice: Any, special: bool) -> None:
    """A call in the tokenizer's own tokens follows its grammar. Whatever is chosen of what may come, there is
    always more that may, although what has to come names special tokens; and the tokens of a call's marks."""
    tokenizer, texts = marked_tokenizer(special), ["a <tool_call> b", "<|im_end|>", "</tool_call>"]
    parameters = {"properties": {"a": {"maximum": 9, "type": "integer"}, "b": {"enum": texts}}}
    tools = tools_of([{"type": "function", "name": "f", "parameters": parameters}], choice, parallel=False)
    assert tools is not None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    grammar = Calls(tools, family, tuple(special_tokens(tokenizer))).grammar()
    grammars = Grammars(tokenizer, len(tokenizer), lambda: [end])
    ids = [*tokenizer(family.written([("f", {"a": 1})]))["input_ids"], end]
    assert grammars.masks(Grammar.lark(grammar), 0).reach([], ids) == len(ids)
    for seed in range(3 if tools.forced else 0):
        masks, rnd, written = grammars.masks(Grammar.lark(grammar), 0), random.Random(seed), list[int]()
        while end not in written:
            words = masks.allowed(written, [])
            assert words is not None
            may = allowed_tokens(words[None], len(tokenizer))[0].nonzero().squeeze(1).tolist()
            written.append(end if end in may else rnd.choice(may))
        said = read(family, tokenizer.decode(written[:-1]), [])
        assert [name for name, _ in said.calls] == ["f"]
        if family is HERMES:
            assert tokenizer.convert_tokens_to_ids("<tool_call>") in written
