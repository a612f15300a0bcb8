"""What an answer is held to: forced calls from the first token on, else from where a call begins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.test_parser import NAMES, read
from tests.chats import calling_tokenizer
from tokenswift.chat.calls import Calls
from tokenswift.chat.family import Family
from tokenswift.chat.hermes import HERMES
from tokenswift.chat.llama3 import LLAMA3
from tokenswift.chat.plain import PLAIN
from tokenswift.chat.tools import tools_of
from tokenswift.grammar import Grammar
from tokenswift.sampling.masks import Grammars

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
        assert first_refused(family, call + family.between + call, choice, parallel=False) == call
    assert first_refused(family, call, NAMED) == call[: call.index("fg") + 1]
    assert first_refused(family, "Hello", "required") == ""
    assert first_refused(family, "Hello {", "auto") is None
    assert first_refused(family, call[:-1], "required") == call[:-1]  # it does not end in a call


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("family", CALL, ids=lambda family: family.name)
def test_no_call_is_wrong(family: Family, choice: str) -> None:
    """Neither a name nor arguments that the schema does not have; what is free is no call."""
    call = CALL[family]
    for old, new in (("fg", "h"), ("12", '"12"'), ('"}"', '"y"'), (', "b"', ', "c"'), ('"a"', '"A"')):
        wrong = call.replace(old, new)
        place = first_refused(family, wrong, choice)
        assert place is not None and wrong.startswith(place) and not call.startswith(wrong), wrong
    spaced = call.replace('{"name"', '{ "name"')
    place = first_refused(family, spaced, choice)
    assert place is not None and read(family, place, []).calls == ()


def test_text_before_a_call() -> None:
    call = CALL[HERMES]
    assert first_refused(HERMES, "I'll see.\n" + call, "auto") is None
    assert first_refused(HERMES, "I'll see.\n" + call, "required") == ""
    assert first_refused(PLAIN, "I'll see.\n" + CALL[PLAIN], "auto") is None  # text, and no call to a parser
    assert read(PLAIN, "I'll see.\n" + CALL[PLAIN], []).calls == ()
