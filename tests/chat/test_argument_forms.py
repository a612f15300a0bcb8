"""Calls whose arguments are no JSON: in tags (Qwen 3.5) and as Python writes them (LFM2)."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.chat.templates import LFM2, QWEN3, QWEN35
from tests.chats import MARKS, calling_model, calling_tokenizer, marked_tokenizer
from tokenswift import LLM, Grammar
from tokenswift.chat import Calls, gathered, thought_of, tools_of
from tokenswift.chat.answer_grammar import answer_grammar
from tokenswift.chat.answers import special_ids
from tokenswift.chat.prompts import prompt_ids
from tokenswift.chat.tools import Tools
from tokenswift.loader.call_forms import HERMES, PLAIN, PYTHONIC, XML, Family, family_of
from tokenswift.sampling.grammars import Grammars
from tokenswift.sampling.rows import allowed_tokens

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"enum": ["C", "F", 5, None]},
        "deep": {"anyOf": [{"$ref": "#/$defs/row"}, {"type": "null"}]},
        "is_wet": {"type": "boolean"},
        "code": {"type": "string", "maxLength": 5, "pattern": "^[a-z/]+$"},
        "key": {"type": ["string", "number"]},
    },
    "required": ["city", "is_wet"],
    "$defs": {"row": {"type": "array", "items": {"type": "integer"}}},
}
TOOLS = [
    {"type": "function", "name": "weather", "parameters": PARAMETERS},
    {"type": "function", "name": "weather-now", "parameters": {"type": "object"}},
]
FORMS = (XML, PYTHONIC)
BREST = {"city": "Brest", "is_wet": True}
BERGEN = {"city": "Bergen", "is_wet": False}


def tools_with(choice: object = None, parallel: bool = True) -> Tools:
    tools = tools_of(TOOLS, choice, parallel)
    assert tools is not None
    return tools


def read(
    family: Family, text: str, cuts: Sequence[int] = (), parallel: bool = True
) -> tuple[str, list[tuple[str, str]], str]:
    """The text, the calls and the thought of an answer that comes in pieces."""
    parser = Calls(tools_with(parallel=parallel), family).parser()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    spoken, calls, thought = gathered([*deltas, *parser.finish()], "answer")
    return spoken, [(call.name, call.arguments) for call in calls], thought


# ---- answers -------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INSIDE = st.sampled_from(
    ["\n", "</parameter", "<parameter=days>\n", '"', "\\", ")", "]", ", x=", "5"]
)
WRITTEN = (
    st.lists(TEXTS | INSIDE, max_size=4).map("".join).filter(lambda t: "</parameter>" not in t)
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": WRITTEN, "is_wet": st.booleans()},
    optional={
        "days": st.integers(),
        "unit": st.sampled_from(["C", "F", 5, None]),
        "deep": st.none() | st.lists(st.integers(), max_size=3),
        "code": WRITTEN,
    },
)
CUTS = st.lists(st.integers(0, 10_000), max_size=30)


@given(st.sampled_from(FORMS), st.lists(ARGUMENTS, min_size=1, max_size=3), CUTS)
def test_calls_in_pieces(family: Family, several: list[dict[str, object]], cuts: list[int]) -> None:
    text = family.spelled(("weather", arguments) for arguments in several)
    spoken, calls, _ = read(family, text, cuts)
    assert spoken == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", arguments) for arguments in several
    ]
    assert read(family, text, cuts, parallel=False)[1] == calls[:1]


LETTERS = [
    "<tool_call>\n<function=weather>\n",
    "<|tool_call_start|>[weather(",
    "<parameter=city>",
    "<parameter=deep>",
    "\n",
    "</parameter>",
    "</function>",
    "</tool_call>",
    "<|tool_call_end|>",
    *("city=", "days=", '"', "'", "\\", "\\u12", "\\ud83d", "[", "{", ":", ",", ")", "]", "}"),
    *("<", "True", "5", " " * 200, "x"),
]


@given(st.sampled_from(FORMS), st.lists(st.sampled_from(LETTERS), max_size=14).map("".join), CUTS)
def test_anything_in_pieces(family: Family, text: str, cuts: list[int]) -> None:
    assert read(family, text, cuts) == read(family, text)
    assert read(family, text, range(len(text))) == read(family, text)


def xml(inner: str, name: str = "weather") -> str:
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def given_as(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


XML_ANSWERS: dict[str, tuple[str, str, list[str]]] = {
    "text before and behind": (
        f"So.\n\n{xml(given_as('city', 'Brest'))}\nBye.",
        "So.\nBye.",
        ['{"city": "Brest"}'],
    ),
    "no arguments": (xml(""), "", ["{}"]),
    "spaced otherwise": (
        "<tool_call> <function=weather><parameter=city>Brest</parameter></function></tool_call>",
        "",
        ['{"city": "Brest"}'],
    ),
    "lines of a text stay": (xml(given_as("city", "\n  a\n\n")), "", ['{"city": "\\n  a\\n\\n"}']),
    "a text that looks like another type": (xml(given_as("city", "5")), "", ['{"city": "5"}']),
    "words of Python": (
        xml(given_as("is_wet", "True") + given_as("deep", "None")),
        "",
        ['{"is_wet": true, "deep": null}'],
    ),
    "of several types": (
        xml(given_as("key", "5.5") + given_as("unit", "5")),
        "",
        ['{"key": 5.5, "unit": 5}'],
    ),
    "a type that the schema refuses": (
        xml(given_as("days", "two") + given_as("deep", "[1, NaN]")),
        "",
        ['{"days": "two", "deep": "[1, NaN]"}'],
    ),
    "what the schema does not list": (
        xml(given_as("wind", "[1]") + given_as("sea", "calm")),
        "",
        ['{"wind": [1], "sea": "calm"}'],
    ),
    "cut in a text": (xml(given_as("city", "Bre"))[:-38], "", ['{"city": "Bre']),
    "cut in a number": (xml(given_as("days", "12"))[:-39], "", ['{"days": 1']),
    "cut behind an argument": (
        xml(given_as("city", "Brest"))[: -len("unction>\n</tool_call>")],
        "",
        ['{"city": "Brest"'],
    ),
    "cut in its end": (xml(given_as("city", "Brest"))[:-4], "", ['{"city": "Brest"}']),
    "words between arguments": (
        xml(given_as("city", "Brest") + "and "),
        "and </function>\n</tool_call>",
        ['{"city": "Brest"}'],
    ),
    "a function that nobody knows": (xml("", "clock"), xml("", "clock"), []),
    "a mark that opens nothing": ("a <tool_call> b", "a <tool_call> b", []),
    "a mark within a text": (
        xml(given_as("city", "<tool_call>\n<function=weather>")),
        "",
        ['{"city": "<tool_call>\\n<function=weather>"}'],
    ),
    "a call as JSON": (
        '{"name": "weather", "arguments": {"city": "Brest"}}',
        "",
        ['{"city": "Brest"}'],
    ),
}
BEGIN = "<|tool_call_start|>["
END = "]<|tool_call_end|>"
PYTHON_ANSWERS: dict[str, tuple[str, str, list[str]]] = {
    "text before and behind": (
        f'So.{BEGIN}weather(city="Brest"){END}Bye.',
        "So.\nBye.",
        ['{"city": "Brest"}'],
    ),
    "no arguments": (f"{BEGIN}weather(){END}", "", ["{}"]),
    "two calls": (
        f"{BEGIN}weather(city='Brest'),\n weather(days = 5){END}",
        "",
        ['{"city": "Brest"}', '{"days": 5}'],
    ),
    "Python's own words": (
        f"{BEGIN}weather(deep=None, is_wet=True, key=+1_000, unit=C){END}",
        "",
        ['{"deep": null, "is_wet": true, "key": 1000, "unit": "C"}'],
    ),
    "values in each other": (
        f"{BEGIN}weather(a=[1, (2, 'b',), {{'c': False, 3: None}},], b={{}}){END}",
        "",
        ['{"a": [1, [2, "b"], {"c": false, "3": null}], "b": {}}'],
    ),
    "escapes": (
        BEGIN + r"""weather(city="a\n\"\'\x41\u00e9\U0001F600\ud83d\ude00\d\\", key='"')""" + END,
        "",
        ['{"city": "a\\n\\"\'Aé😀😀\\\\d\\\\", "key": "\\""}'],
    ),
    "marks of calls within a text": (
        f'{BEGIN}weather(city=")]{END[1:]}, x=1"){END}',
        "",
        [json.dumps({"city": f")]{END[1:]}, x=1"})],
    ),
    "without keys": (
        f'{BEGIN}weather("Brest", 5){END}',
        "",
        ['{"city": "Brest", "days": 5}'],
    ),
    "cut in a text": (f'{BEGIN}weather(city="Bre', "", ['{"city": "Bre']),
    "cut in a number": (f"{BEGIN}weather(days=1", "", ['{"days": ']),
    "cut behind an argument": (f'{BEGIN}weather(city="a"', "", ['{"city": "a"']),
    "cut in its end": (f'{BEGIN}weather(city="a")]<|tool', "", ['{"city": "a"}']),
    "no value": (f"{BEGIN}weather(city=){END}", "", ['{"city": null}']),
    "a function that nobody knows": (f"{BEGIN}clock(){END}", f"{BEGIN}clock(){END}", []),
    "nothing called": (f"{BEGIN}{END}", f"{BEGIN}{END}", []),
}
CASES = [(XML, *case) for case in XML_ANSWERS.values()]
CASES += [(PYTHONIC, *case) for case in PYTHON_ANSWERS.values()]
NAMES = [*(f"xml: {name}" for name in XML_ANSWERS), *(f"python: {name}" for name in PYTHON_ANSWERS)]


@pytest.mark.parametrize(("family", "text", "spoken", "arguments"), CASES, ids=NAMES)
def test_answers(family: Family, text: str, spoken: str, arguments: list[str]) -> None:
    for cuts in ([], range(len(text)), range(0, len(text), 3)):
        said, calls, _ = read(family, text, cuts)
        assert said == spoken
        assert [one for _, one in calls] == arguments


def test_names_that_begin_alike_are_told_apart() -> None:
    for family in FORMS:
        text = family.spelled([("weather-now", {"a": "b"})])
        assert read(family, text)[1] == [("weather-now", '{"a": "b"}')]


@pytest.mark.parametrize(("family", "opening"), [(XML, "<parameter=city>\n"), (PYTHONIC, 'city="')])
def test_a_text_is_told_as_it_comes(family: Family, opening: str) -> None:
    parser = Calls(tools_with(), family).parser()
    parser.push(family.opening + family.head.replace("NAME", "weather") + opening)
    assert [delta.text for delta in parser.push("Bre")] == ["Bre"]
    assert [delta.text for delta in parser.push("st & ")] == ["st & "]


HOSTILE = [
    (XML, "<parameter=deep>\n" + "[" * 100_000),
    (XML, "<parameter=deep>\n" + "9" * 100_000 + "\n</parameter>\n"),
    (XML, "<parameter=" + "x" * 100_000),
    (XML, "<parameter=city>\n" + "\n</parameter" * 20_000),
    (PYTHONIC, "city=" + "[" * 100_000),
    (PYTHONIC, "days=" + "9" * 100_000 + ")"),
    (PYTHONIC, "x" * 100_000),
    (PYTHONIC, "," * 100_000),
    (PYTHONIC, 'city="' + "\\" * 100_001),
]


@pytest.mark.parametrize(("family", "inner"), HOSTILE, ids=range(len(HOSTILE)))
def test_no_answer_takes_long_to_read(family: Family, inner: str) -> None:
    begun = time.process_time()
    text = family.opening + family.head.replace("NAME", "weather") + inner
    parser = Calls(tools_with(), family).parser()
    for at in range(0, len(text), 20):
        parser.push(text[at : at + 20])
    parser.finish()
    assert time.process_time() - begun < 3


# ---- grammars ------------------------------------------------------------------------------------


def form_tokenizer(special: bool = True, template: str = QWEN35) -> PreTrainedTokenizerFast:
    """A tokenizer with the marks of both forms; Qwen's are special tokens or not."""
    tokenizer = marked_tokenizer(special)
    marks = ["<|tool_call_start|>", "<|tool_call_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer


def first_refused(family: Family, text: str, choice: object = None, special: bool = True) -> str:
    """What is left of an answer where its grammar refuses it; "": it may be one."""
    tokenizer = form_tokenizer(special)
    end = tokenizer.get_vocab()["<|im_end|>"]
    grammar = Grammar.lark(answer_grammar(family, tools_with(choice), special_ids(tokenizer)))
    masks = Grammars(tokenizer, len(tokenizer), lambda: [end]).masks(grammar, 0)
    ids = [*tokenizer(text)["input_ids"], end]
    return str(tokenizer.decode(ids[masks.reach([], ids) :]))


VALID: dict[str, Mapping[str, object]] = {
    "required alone": BREST,
    "all": {
        "city": "a\n<b> </function>",
        "days": 5,
        "unit": "F",
        "deep": [1, 2],
        "is_wet": False,
        "code": "a/b",
        "key": "x",
    },
    "nothing in a text": {"city": "", "deep": None, "is_wet": True, "key": 5},
}
WRONG: dict[str, Mapping[str, object]] = {
    "one is missing": {"city": "Brest"},
    "too large": {"city": "Brest", "days": 10, "is_wet": True},
    "no such choice": {"city": "Brest", "unit": "K", "is_wet": True},
    "too long": {**BREST, "code": "abcdef"},
    "not of the pattern": {**BREST, "code": "ABC"},
    "not listed": {**BREST, "wind": "x"},
    "twice in another order": {"is_wet": True, "city": "Brest"},
    "another type": {"city": "Brest", "is_wet": "perhaps"},
    "in a list": {"city": "Brest", "deep": ["x"], "is_wet": True},
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("family", FORMS, ids=lambda family: family.title)
def test_calls_are_held_to_their_schema(family: Family, choice: object, special: bool) -> None:
    for arguments in VALID.values():
        text = family.spelled([("weather", arguments), ("weather", BERGEN)])
        assert first_refused(family, text, choice, special) == ""
    for name, arguments in WRONG.items():
        assert first_refused(family, family.spelled([("weather", arguments)]), choice, special), (
            name
        )
    free = first_refused(family, "It rains.", choice, special)
    assert (free == "") is (choice == "auto")
    anything = family.spelled([("weather-now", {"wind": "x", "sea": "y"})])
    assert (first_refused(family, anything, choice, special) == "") is (choice != NAMED)


@pytest.mark.parametrize("family", FORMS, ids=lambda family: family.title)
def test_whatever_a_grammar_lets_through_parses(family: Family) -> None:
    """Random tokens that it admits are calls whose arguments fit the schema."""
    tokenizer = form_tokenizer()
    end = tokenizer.get_vocab()["<|im_end|>"]
    properties = {**PARAMETERS["properties"], "city": {"type": "string", "maxLength": 12}}
    tool = {
        **TOOLS[0],
        "parameters": {**PARAMETERS, "properties": properties, "required": ["city"]},
    }
    tools = tools_of([tool], "required", False)
    assert tools is not None
    grammar = Grammar.lark(answer_grammar(family, tools, special_ids(tokenizer)))
    for seed in range(8):
        masks = Grammars(tokenizer, len(tokenizer), lambda: [end]).masks(grammar, 0)
        rnd = random.Random(seed)
        chosen = list[int]()
        while end not in chosen:
            words = masks.allowed(chosen, [])
            assert words is not None
            may = allowed_tokens(words[None], len(tokenizer))[0].nonzero().squeeze(1).tolist()
            chosen.append(end if end in may else rnd.choice(may))
        parser = Calls(tools, family).parser()
        answer = str(tokenizer.decode(chosen[:-1]))
        text, calls, _ = gathered([*parser.push(answer), *parser.finish()], "answer")
        assert text == ""
        (call,) = calls
        arguments = json.loads(call.arguments)
        assert arguments.keys() <= properties.keys()
        assert isinstance(arguments["city"], str)
        assert arguments.get("days", 0) <= 9
        assert type(arguments.get("is_wet", True)) is bool
        assert arguments.get("unit") in ("C", "F", 5, None)


ODD_SCHEMAS: list[dict[str, object]] = [
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"a>\n</parameter>": {"type": "string"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/nothing"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}]}}},
    {"type": "object", "properties": {"a": {"type": "string", "enum": ["</parameter>"]}}},
    {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"anyOf": [{"required": ["a"]}], "properties": {"a": {"enum": [""]}}},
    {"type": "object", "properties": {str(i): {"type": "integer"} for i in range(60)}},
]


@pytest.mark.parametrize("schema", ODD_SCHEMAS, ids=range(len(ODD_SCHEMAS)))
@pytest.mark.parametrize("family", FORMS, ids=lambda family: family.title)
def test_odd_schemas_make_grammars(family: Family, schema: dict[str, object]) -> None:
    tools = tools_of([{"type": "function", "name": "f", "parameters": schema}], "required")
    assert tools is not None
    tokenizer = form_tokenizer()
    end = tokenizer.get_vocab()["<|im_end|>"]
    grammar = Grammar.lark(answer_grammar(family, tools, special_ids(tokenizer)))
    masks = Grammars(tokenizer, len(tokenizer), lambda: [end]).masks(grammar, 0)
    ids = tokenizer(family.opening + family.head.replace("NAME", "f"))["input_ids"]
    assert masks.reach([], ids) == len(ids)


# ---- prompts -------------------------------------------------------------------------------------


def test_the_form_is_known_by_the_template() -> None:
    assert family_of(QWEN35) is XML
    assert family_of(QWEN3) is HERMES
    assert family_of(LFM2) is PYTHONIC
    unnamed = LFM2.replace("{# <|tool_call_start|> #}", "")
    assert family_of(unnamed) is PLAIN
    assert family_of(unnamed, special_ids(form_tokenizer())) is PYTHONIC


def conversation(thought: str = "") -> list[dict[str, object]]:
    function = {"name": "weather", "arguments": '{"city": "Brest\\n", "days": 5, "deep": [1]}'}
    call = {"id": "1", "type": "function", "function": function}
    answer: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if thought:
        answer["reasoning_content"] = thought
    result: dict[str, object] = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    return [{"role": "user", "content": "Umbrella?"}, answer, result]


def written(template: str, messages: list[dict[str, object]], **options: object) -> str:
    tokenizer = form_tokenizer(template=template)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    ids = prompt_ids(messages, tokenizer, len(tokenizer), tools=tools, options=options)
    return str(tokenizer.decode(ids))


def test_calls_go_back_into_the_conversation() -> None:
    text = written(QWEN35, conversation("Plan."))
    assert text.endswith(
        "<assistant><think>\nPlan.\n</think>\n\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nBrest\n\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
        "<parameter=deep>\n[1]\n</parameter>\n</function>\n</tool_call><end>"
        "<user><tool_response>\nrain\n</tool_response><end><assistant><think>\n"
    )
    python = '<|tool_call_start|>[weather(city="Brest\\n", days=5, deep=[1])]<|tool_call_end|>'
    assert written(LFM2, conversation()).endswith(
        f"<assistant>{python}<end><tool><|tool_response_start|>rain<|tool_response_end|><end>"
        "<assistant>"
    )


def test_a_thought_begins_or_not_by_the_template() -> None:
    tokenizer = form_tokenizer()
    question: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
    for options, thought in (({}, "begun"), ({"enable_thinking": False}, "")):
        ids = prompt_ids(question, tokenizer, len(tokenizer), options=options)
        assert thought_of(tokenizer, ids) == thought


@pytest.mark.parametrize("template", [QWEN35, LFM2], ids=["qwen3.5", "lfm2"])
def test_a_chat_in_python(template: str) -> None:
    """Of a model that would write anything: a forced call parses, and its result goes back."""
    mark = MARKS[0] if template == QWEN35 else "<|tool_call_start|>"
    tokenizer = calling_tokenizer(template, mark)
    llm = LLM.from_model(calling_model(2048, tokenizer, {}), tokenizer, heads=None)
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Brest", "Bergen"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
    }
    tools = [{"type": "function", "name": "weather", "parameters": parameters}]
    messages: list[dict[str, object]] = [{"role": "user", "content": "Umbrella?"}]
    reply = llm.chat(
        messages,
        400,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        template_options={"enable_thinking": False},
    )
    (call,) = reply.tool_calls
    assert json.loads(call.arguments).keys() == {"city", "days"}
    assert reply.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    prompt = tokenizer.decode(llm.encode([*messages, reply.message, result]))
    assert json.loads(call.arguments)["city"] in prompt
