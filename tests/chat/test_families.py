"""Tools with the families' own chat templates: nothing of a conversation is lost on its way to the
model, and calls in the families' own marks are read."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TypeAlias

import pytest
from transformers import PreTrainedTokenizerFast

from tests.chat.templates import GEMMA2, GEMMA3, MISTRAL, QWEN, SMOLLM3, TEMPLATES
from tests.chat.templates import GRANITE as GRANITE_TEMPLATE
from tests.chat.templates import PHI as PHI_TEMPLATE
from tests.chats import calling_tokenizer, marked_tokenizer
from tokenswift import SamplingParams
from tokenswift.chat import Calls, gathered, tools_of
from tokenswift.chat.answers import call_id, special_ids
from tokenswift.chat.prompts import prompt_ids
from tokenswift.grammar import Grammar
from tokenswift.loader.call_forms import (
    COHERE,
    DEEPSEEK,
    FAMILIES,
    GRANITE,
    HERMES,
    LLAMA3,
    MISTRAL_ARGS,
    PHI,
    PLAIN,
    Family,
    family_of,
)
from tokenswift.loader.call_forms import MISTRAL as MISTRAL_FORM
from tokenswift.loader.chat_template import abilities_of
from tokenswift.sampling.grammars import Grammars
from tokenswift.types import InputError

Message: TypeAlias = dict[str, object]
V = 10**6
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Brest", "Bergen"]}},
    "required": ["city"],
}
WEATHER: Message = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TOOLS: list[Message] = [WEATHER]
#: a tool whose words stand nowhere else
RESULT_TURNS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "described",
            "parameters": {"type": "object", "properties": {"district": {"type": "string"}}},
        },
    }
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def written(
    template: str, messages: list[Message], tools: list[Message] | None = RESULT_TURNS
) -> str:
    """The prompt of a conversation."""
    tokenizer = calling_tokenizer(template)
    return tokenizer.decode(prompt_ids(messages, tokenizer, V, tools=tools))


# ---- conversations -------------------------------------------------------------------------------


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str | None, *cities: str) -> Message:
    """An answer that calls for each city; the id of its call is its name."""
    message: Message = {"role": "assistant", "content": text}
    if cities:
        message["tool_calls"] = [call(city) for city in cities]
    return message


def call(city: str, arguments: str = "") -> Message:
    function = {"name": "weather", "arguments": arguments or json.dumps({"city": city})}
    return {"id": f"call_of_{city}", "type": "function", "function": function}


def result(city: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_of_{city}", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
#: what is said, in any order, with the last of it last
CONVERSATIONS: dict[str, tuple[list[Message], list[str]]] = {
    "a result": (
        [user("Umbrella?"), answer(None, "Brest"), result("Brest", "rain")],
        ["Umbrella?", "Brest", "rain"],
    ),
    "two results": (
        [SYSTEM, user("Both?"), answer("", "Brest", "Bergen")]
        + [result("Brest", "rain"), result("Bergen", "snow")],
        ["Be brief.", "Both?", "Brest", "Bergen", "rain", "snow"],
    ),
    "a result and a question": (
        [user("Umbrella?"), answer(None, "Brest"), result("Brest", "rain"), user("And hats?")],
        ["Umbrella?", "Brest", "rain", "And hats?"],
    ),
    "text beside a call": (
        [user("Umbrella?"), answer("Let me see.", "Brest"), result("Brest", "rain")]
        + [answer("It pours."), user("Hats?")],
        ["Umbrella?", "Let me see.", "Brest", "rain", "It pours.", "Hats?"],
    ),
    "text beside two calls": (
        [user("Both?"), answer("Let me see.", "Brest", "Bergen")]
        + [result("Brest", "rain"), result("Bergen", "snow")],
        ["Both?", "Let me see.", "Brest", "Bergen", "rain", "snow"],
    ),
    "two rounds": (
        [user("Umbrella?"), answer(None, "Brest"), result("Brest", "rain")]
        + [answer(None, "Bergen"), result("Bergen", "snow"), answer("Wet."), user("Hats?")],
        ["Umbrella?", "Brest", "rain", "Bergen", "snow", "Wet.", "Hats?"],
    ),
    "the assistant begins": (
        [answer("How can I help?"), user("Umbrella?")],
        ["How can I help?", "Umbrella?"],
    ),
    "a result of an unknown call": (
        [user("Hi"), {"role": "tool", "name": "clock", "content": "noon"}],
        ["Hi", "clock: noon"],
    ),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost(name: str, case: str) -> None:
    """Of tools, calls, results and texts."""
    messages, texts = CONVERSATIONS[case]
    text = written(TEMPLATES[name], messages)
    assert [word for word in ["described", "district", *texts] if word not in text] == []
    assert text.rindex(texts[-1]) == max(map(text.rindex, texts))


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_were_cut_are_told(name: str) -> None:
    """They are those of an answer of ours that reached its length."""
    cut = answer(None) | {"tool_calls": [call("Brest", '{"city": "Bre')]}
    text = written(TEMPLATES[name], [user("Umbrella?"), cut, result("Brest", "nothing")])
    assert "Bre" in text
    assert "nothing" in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_our_own_ids_are_taken(name: str) -> None:
    """By every template, in the next turn."""
    called = call("Brest") | {"id": call_id("answer", 0)}
    answered = {"role": "tool", "tool_call_id": called["id"], "content": "rain"}
    messages = [user("Hi"), {"role": "assistant", "content": "", "tool_calls": [called]}, answered]
    assert "rain" in written(TEMPLATES[name], messages)


def test_ids_of_a_client_are_rewritten_alike() -> None:
    """Where a template wants nine letters and digits; those of that form stay."""
    messages, _ = CONVERSATIONS["two results"]
    text = written(MISTRAL, messages)
    ids = re.findall(r'"id": "(\w{9})"', text)
    assert len(set(ids)) == 2
    assert re.findall(r'"call_id": "(\w{9})"', text) == ids
    assert "call_of_Brest" in str(messages[2]["tool_calls"])
    short = call("Brest") | {"id": "abcdef123"}
    answered = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    turns = [user("Hi"), {"role": "assistant", "content": "", "tool_calls": [short]}, answered]
    assert written(MISTRAL, turns).count("abcdef123") == 2


@pytest.mark.parametrize("template", [GEMMA2, GEMMA3], ids=["Gemma 2", "Gemma 3"])
def test_turns_alternate(template: str) -> None:
    """A loop of tools where a template knows neither tools nor two turns of one role."""
    messages, _ = CONVERSATIONS["two results"]
    text = written(template, [*messages, user("Hats?")], tools=None)
    assert text == (
        "<turn>user\nBe brief.\n\nBoth?<end>\n<turn>model\n"
        '{"name": "weather", "arguments": {"city": "Brest"}}\n'
        '{"name": "weather", "arguments": {"city": "Bergen"}}<end>\n<turn>user\n'
        "Result of weather: rain\n\nResult of weather: snow\n\nHats?<end>\n<turn>model\n"
    )


def test_results_have_the_role_that_the_family_knows() -> None:
    text = written(GRANITE_TEMPLATE, CONVERSATIONS["a result"][0])
    assert text.endswith(
        '<assistant><|tool_call|>[{"name": "weather", "arguments": {"city": "Brest"}}]<end>'
        "<tool_response>rain<end><assistant>"
    )


def test_tools_stand_in_the_system_message_where_its_template_has_a_place_for_them() -> None:
    text = written(PHI_TEMPLATE, CONVERSATIONS["a result"][0], tools=TOOLS)
    system, _, rest = text.partition("<|end|>")
    assert re.fullmatch(r"<\|system\|>[^<]*<\|tool\|>\[\{.*\}\]<\|/tool\|>", system)
    assert '"name": "weather"' in system
    assert rest.endswith(
        '<|assistant|><|tool_call|>[{"name": "weather", "arguments": {"city": "Brest"}}]'
        "<|/tool_call|><|end|><|tool_response|>rain<|end|><|assistant|>"
    )


def test_a_role_that_a_template_would_write_as_a_mark_is_none() -> None:
    with pytest.raises(InputError, match="is 'tool_call'; valid: system, developer, user"):
        written(PHI_TEMPLATE, [user("Hi"), {"role": "tool_call", "content": "x"}])


def test_a_result_needs_a_call_or_a_name() -> None:
    with pytest.raises(InputError, match="tool_call_id is 'x'; valid: the id of a call"):
        written(QWEN, [user("Hi"), {"role": "tool", "tool_call_id": "x", "content": "y"}])


def test_what_is_told_in_words_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    template = SMOLLM3 + "{# of this test #}"
    plain = template.replace("xml_tools", "no_tools")
    messages, _ = CONVERSATIONS["a result"]
    with caplog.at_level(logging.WARNING, "tokenswift"):
        for _ in range(2):
            written(template, messages)
            written(plain, [user("Hi")])
    assert [record.message for record in caplog.records] == [
        "the model's chat template does not write calls of tools: they are told as text",
        "the model's chat template has no place for tools: a system message tells of them",
    ]


# ---- the table of docs/tools.md ------------------------------------------------------------------


def table() -> dict[str, list[str]]:
    """The rows of the families' table, by family."""
    text = Path("docs/tools.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z].*) \|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    return {first: rest for first, *rest in cells if first in TEMPLATES}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_table_says_what_templates_do(name: str) -> None:
    tokenizer = calling_tokenizer(TEMPLATES[name])
    abilities = abilities_of(TEMPLATES[name], tokenizer)
    tools = {"tools": "template", "xml_tools": "template", None: "words"}
    calls = "words" if abilities.calls is None else "template"
    family = family_of(TEMPLATES[name])
    by_role = abilities.calls or abilities.result_role or family.result_role
    several = "a message each" if abilities.calls and not abilities.parallel else "one message"
    assert table()[name] == [
        "template" if abilities.system_tools else tools[abilities.tool_variable],
        calls,
        "template" if by_role else "words",
        several,
        f"`{family.title}`",
    ]


# ---- answers -------------------------------------------------------------------------------------


def read(family: Family, text: str, size: int) -> tuple[str, list[tuple[str, str]], str]:
    """The text, the calls and the thought of an answer that comes in pieces of a size."""
    calls = Calls(tools_of(TOOLS), family)
    parser = calls.parser()
    deltas = [d for at in range(0, len(text), size) for d in parser.push(text[at : at + size])]
    spoken, called, thought = gathered([*deltas, *parser.finish()], "answer")
    return spoken, [(one.name, one.arguments) for one in called], thought


ONE = [("weather", '{"city": "Brest"}')]
TWO = [*ONE, ("weather", '{"city":"Bergen"}')]
OBJECT = '{"name": "weather", "arguments": {"city": "Brest"}}'
OTHER = '{"name":"weather","arguments":{"city":"Bergen"}}'
ACTION = (
    '<|START_THINKING|>Plan.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
    '"tool_name": "weather", "parameters": {"city": "Brest"}}\n]<|END_ACTION|>'
)
DEEP_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Brest"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
ANSWERS: list[tuple[Family, str, tuple[str, list[tuple[str, str]], str]]] = [
    (MISTRAL_FORM, f"[TOOL_CALLS] [{OBJECT}, {OTHER}]", ("", TWO, "")),
    (MISTRAL_FORM, f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcdef123"}}]', ("", ONE, "")),
    (MISTRAL_FORM, f"So:[TOOL_CALLS] [{OBJECT}", ("So:", ONE, "")),
    (MISTRAL_ARGS, 'See:\n[TOOL_CALLS]weather[ARGS]{"city": "Brest"}', ("See:", ONE, "")),
    (
        MISTRAL_ARGS,
        '[TOOL_CALLS]weather[ARGS]{"city": "Brest"}[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]'
        '{"city":"Bergen"}',
        ("", TWO, ""),
    ),
    (MISTRAL_ARGS, "[TOOL_CALLS]clock[ARGS]{}", ("[TOOL_CALLS]clock[ARGS]{}", [], "")),
    (GRANITE, f"<|tool_call|>[{OBJECT}, {OTHER}]", ("", TWO, "")),
    (GRANITE, "<|tool_call|>[]", ("<|tool_call|>[]", [], "")),
    (PHI, f"<|tool_call|>[{OBJECT}, {OTHER}]<|/tool_call|>", ("", TWO, "")),
    (PHI, f"So:<|tool_call|>[{OBJECT}]<|/tool_call|>", ("So:", ONE, "")),
    (PHI, f"<|tool_call|>[{OBJECT}", ("", ONE, "")),
    (COHERE, ACTION, ("", ONE, "Plan.")),
    (COHERE, "<|START_RESPONSE|>It rains.<|END_RESPONSE|>", ("It rains.", [], "")),
    (DEEPSEEK, DEEP_CALL, ("", ONE, "")),
    (
        LLAMA3,
        '{"type": "function", "name": "weather", "parameters": {"city": "Brest"}}',
        ("", ONE, ""),
    ),
    (LLAMA3, f"[{OBJECT}, {OTHER}]", ("", TWO, "")),
    (PLAIN, f"[{OBJECT},\n {OTHER}]", ("", TWO, "")),
    (HERMES, f"```json\n[{OBJECT}]\n```", ("", ONE, "")),
    (HERMES, f"First.\n<tool_call>{OBJECT}</tool_call>\nThen.", ("First.\nThen.", ONE, "")),
    (PLAIN, f' {OBJECT[:-1]}, "id": "1", "type": "function"}}', ("", ONE, "")),
    (PLAIN, r' {"name": "weather", "arguments": "{\"city\": \"Brest\"}"}', ("", ONE, "")),
    (PLAIN, f"[{OBJECT}, " + '{"name": "wea', ("", ONE, "")),
]
REPORTS = [
    f'```json\n{OBJECT[:-1]}, "result": "rain"}}\n```',
    f'```json\n[{OBJECT}, {OBJECT[:-1]}, "result": "rain"}}]\n```',
    ' {"result": "rain", "name": "weather", "arguments": {"city": "Brest"}}',
    ' {"name": "weather", "name": "weather", "arguments": {}}',
    ' {"name": "weather", "arguments": [1]}',
    ' {"name": "weather", "arguments": null}',
    ' {"name": "weather"}',
    ' {"name": "weather", "arguments": {}, "parameters": {}}',
    ' {"name": ["weather"], "arguments": {}}',
    f"[{OBJECT}, 5]",
    "[]",
    "[[[[",
    "{",
]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("family", "text", "wanted"), ANSWERS)
def test_calls_in_the_familys_marks(
    family: Family, text: str, wanted: tuple[str, list[tuple[str, str]], str], size: int
) -> None:
    assert read(family, text, size) == wanted


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("text", REPORTS)
def test_a_call_is_the_whole_object_or_none(text: str, size: int) -> None:
    """An answer that reports a result calls nothing."""
    assert read(PLAIN, text, size) == (text, [], "")


# ---- grammars ------------------------------------------------------------------------------------


def special_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A tokenizer in which the family's marks are special tokens."""
    tokenizer = marked_tokenizer(special=True)
    text = family.spelled([("weather", {})]) + "".join(family.passing) + family.id_opening
    marks = re.findall(r"<[|｜][^<>]*>|\[/?[A-Z_]+\]", text)
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(marks))})
    return tokenizer


def bound(family: Family, tokenizer: PreTrainedTokenizerFast, choice: object = None) -> Grammar:
    calls = Calls(tools_of(TOOLS, choice), family, special_ids(tokenizer))
    grammar = calls.bound(SamplingParams()).grammar
    assert grammar is not None
    return grammar


def is_allowed(grammar: Grammar, tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    """Whether a grammar lets a whole answer through."""
    end = tokenizer.get_vocab()["<|im_end|>"]
    masks = Grammars(tokenizer, len(tokenizer), lambda: [end]).masks(grammar, 0)
    ids = [*tokenizer(text)["input_ids"], end]
    return masks.reach([], ids) == len(ids)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_marks_that_are_special_tokens_pass(family: Family, choice: object) -> None:
    """Calls are what the family writes, and their arguments are held to the schema."""
    tokenizer = special_tokenizer(family)
    grammar = bound(family, tokenizer, choice)
    calls = [("weather", {"city": "Brest"}), ("weather", {"city": "Bergen"})]
    assert is_allowed(grammar, tokenizer, family.spelled(calls))
    wrong = family.spelled([("weather", {"city": "Paris"})])
    assert not is_allowed(grammar, tokenizer, wrong)
    assert is_allowed(grammar, tokenizer, "It rains.") is (choice == "auto")


@pytest.mark.parametrize(
    ("family", "text", "allowed"),
    [
        (COHERE, "<|START_RESPONSE|>It rains.<|END_RESPONSE|>", True),
        (COHERE, ACTION, True),
        (COHERE, ACTION.replace("Brest", "Paris"), False),
        (MISTRAL_FORM, f"Let me see.[TOOL_CALLS] [{OBJECT}]", True),
        (MISTRAL_FORM, f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcdef123"}}]', True),
        (MISTRAL_ARGS, 'x[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "Brest"}', True),
        (MISTRAL_ARGS, '[TOOL_CALLS]clock[ARGS]{"city": "Brest"}', False),
        (MISTRAL_ARGS, OBJECT, True),
        (GRANITE, f"<|tool_call|> [{OBJECT}]", True),
        (GRANITE, OBJECT.replace("Brest", "Paris"), False),
    ],
)
def test_special_tokens_in_a_free_answer(family: Family, text: str, allowed: bool) -> None:
    tokenizer = special_tokenizer(family)
    assert is_allowed(bound(family, tokenizer), tokenizer, text) is allowed
