"""Grammars that are refused, each in one line before anything is decoded; closed objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.conftest import tiny_tokenizer
from tests.lossless.test_grammar import END, ids_of, masks_of
from tests.tiny import byte_model
from tokenswift import LLM, Grammar, InputError
from tokenswift.json_schema import closed
from tokenswift.sampling import grammars as tried
from tokenswift.sampling.grammars import Grammars
from tokenswift.sampling.masks import NoMask


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_model(byte_model(), tiny_tokenizer(), heads=None) as opened:
        yield opened


DEEP = json.loads("{}")
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Grammar.json_schema({"type": "foo"}),
            "the JSON schema cannot be compiled (Invalid",
        ),
        (lambda: Grammar.json_schema({"not": {"type": "null"}}), 'Unimplemented keys: ["not"]'),
        (lambda: Grammar.json_schema({"$ref": "http://example.org/x"}), "cannot be compiled"),
        (
            lambda: Grammar.json_schema(DEEP),
            "is too large; valid: up to 524,288 characters, 20,000 values",
        ),
        (lambda: Grammar.json_schema({"enum": ["a"] * 20_000}), "is too large"),
        (lambda: Grammar.json_schema("{"), "is '{'; valid: JSON ("),
        (lambda: Grammar.json_schema("[" * 100_000), "valid: JSON (maximum recursion"),
        (lambda: Grammar.regex("(a"), "unclosed group"),
        (lambda: Grammar.regex("a" * 600_000), "is too large"),
        (lambda: Grammar.regex(""), "is ''; valid: text"),
        (
            lambda: Grammar.choice(["a", ""]),
            "the choice is ['a', '']; valid: texts, none of them empty",
        ),
        (lambda: Grammar.lark("start: other"), 'unknown name: "other"'),
        (lambda: Grammar.lark("start: " + "(" * 9000 + '"a"' + ")" * 9000), "too deeply nested"),
        (lambda: Grammar.lark("start: A\nA: /a/ & /b/"), "(no text is possible)"),
        (lambda: Grammar.lark("start: <[270]>"), "oo large: 270"),
        (lambda: Grammar("yaml", "x"), "grammar.kind is 'yaml'; valid: json_schema, "),
        (lambda: {"kind": "regex"}, "grammar is {'kind': 'regex'}; valid: a Grammar, or"),
    ],
)
def test_grammars_that_are_refused(llm: LLM, make: Any, says: str) -> None:
    """One line each, before anything is decoded."""
    with pytest.raises(InputError) as caught:
        llm.generate("abc", 5, grammar=make())
    line = str(caught.value)
    assert says in line
    assert "valid: " in line
    assert "\n" not in line
    assert len(line) < 420, line
    assert caught.value.field in ("grammar", "grammar.kind")


def test_grammars_that_nothing_stops_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that overflow llguidance's stack, and a step of automata that it does not bound, behind
    a token that is special."""
    rules = "\n".join(f'r{i}: r{i + 1} r{i + 1} | "x"' for i in range(5000))
    with pytest.raises(
        InputError, match=r"cannot be compiled \(ends the process that tries it .code -\d+.\)"
    ):
        masks_of(Grammar.lark(f'start: r0\n{rules}\nr5000: "y"'))
    monkeypatch.setattr(tried, "SECONDS", 2)
    with pytest.raises(InputError, match="cannot be compiled .*takes too long"):
        masks_of(Grammar.lark('start: <s> %json {"type": "integer", "multipleOf": 999983}'))
    every = " & ".join(f"/(.|\\n)*x{i}(.|\\n)*/" for i in range(40))
    with pytest.raises(InputError, match="cannot be compiled .*takes too long"):
        masks_of(
            Grammar.lark(f"start: /[a-z]{{99}}/ A\nA: {every}")
        )  # behind more than any trial writes
    conjoined = {"allOf": [{"type": "string", "pattern": f"x{i}.*y"} for i in range(40)]}
    with pytest.raises(InputError, match="cannot be compiled .*takes too long"):
        masks_of(Grammar.json_schema(conjoined))


def test_limits_of_a_trial_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that failed for the lack of time or memory may be tried again."""
    grammar = Grammar.regex("a trial of limits")
    for name, little in (("SECONDS", 0.001), ("MEMORY", 1 << 20)):
        with monkeypatch.context() as patch:
            patch.setattr(tried, name, little)
            with pytest.raises(InputError, match="cannot be compiled"):
                masks_of(grammar)
    masks_of(grammar)


def test_asking_whether_schemas_can_be_held_lets_go_of_no_compiled_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(tiny_tokenizer(), 270, lambda: {END})
    grammar = Grammar.regex("kept")
    grammars.masks(grammar, 0)
    schemas = [{"enum": [number]} for number in range(tried.MOST_KEPT + 1)]
    assert [grammars.reason_not_held(schema) for schema in schemas] == [None] * len(schemas)
    monkeypatch.setattr(tried, "_compiled", None)  # nothing is compiled any more
    assert grammars.masks(grammar, 0).allowed([], []) is not None


def test_a_schema_is_asked_of_for_the_model() -> None:
    """A model without an end-of-text token can be held to none."""
    grammars = Grammars(tiny_tokenizer(), 270, lambda: set())
    assert grammars.reason_not_held(True) == "the model has no end-of-text token"


def test_a_trial_imports_nothing_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "llguidance", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    masks_of(Grammar.regex("a trial elsewhere"))


def test_a_choice_of_thousands(llm: LLM) -> None:
    texts = [f"option {number}" for number in range(3000)]
    assert llm.generate("abc", 20, grammar=Grammar.choice(texts), seed=2).text in texts


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf constraints are not supported"),
        ({"pattern": "^(?=a)"}, "look-around"),
    ],
)
def test_what_llguidance_does_not_support_is_refused(schema: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        masks_of(Grammar.json_schema(schema))


def test_too_many_optional_properties_end_the_text() -> None:
    properties = {f"name{i}": {"type": "integer"} for i in range(800)}
    masks = masks_of(Grammar.json_schema({"type": "object", "properties": properties}))
    with pytest.raises(NoMask, match="Current row has 3199 items; max is 2000"):
        masks.allowed(ids_of("{"), [])


def test_a_model_without_an_end_takes_no_grammar() -> None:
    grammars = Grammars(tiny_tokenizer(), 270, set)
    with pytest.raises(InputError, match="the model has no end-of-text token"):
        grammars.masks(Grammar.regex("a"), 0)


@pytest.mark.parametrize("token", ["<s>", "<[269]>"])
def test_tokens_in_a_grammar(token: str) -> None:
    """By their names and by their ids, up to the width of the logits."""
    assert masks_of(Grammar.lark(f'start: "a" {token} "b"')).forced([])[0][0] == ids_of("a")[0]


def test_what_does_not_go_with_a_grammar(llm: LLM) -> None:
    regex = Grammar.regex("a+")
    published = {"tree": (1, 2), "acceptance": "published"}
    calls: list[tuple[dict[str, object], str]] = [
        ({"strategy": "tokenswift", "strategy_options": published}, "acceptance is published"),
        ({"ignore_eos": True}, "ignore_eos is True together with a grammar"),
        ({"min_tokens": 2}, "min_tokens is 2 together with a grammar"),
        ({"response_format": {"type": "json_object"}}, "given together with"),
        (
            {"grammar": None, "response_format": {"type": "xml"}},
            "response_format is {'type': 'xml'}",
        ),
        (
            {"grammar": None, "response_format": {"type": "json_schema"}},
            "is {'type': 'json_schema'}",
        ),
    ]
    for options, says in calls:
        with pytest.raises(InputError, match=re.escape(says)):
            keywords: dict[str, Any] = {"grammar": regex, **options}
            llm.generate("a", 5, **keywords)
    with (
        LLM.from_model(byte_model(), None, heads=None) as bare,
        pytest.raises(InputError, match="tokenizer"),
    ):
        bare.generate([5], 5, grammar=regex)


# ---- objects have no members that their schema does not list, unless it says so ------------------

A: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}


class Inner(BaseModel):
    a: int


class Outer(BaseModel):
    one: Inner
    many: list[Inner]
    either: Inner | None = None
    free: dict[str, int] = {}


def follows(schema: Any, text: str) -> bool:
    """Whether a text is one of a schema's, or of a grammar's."""
    grammar = Grammar.json_schema(schema) if isinstance(schema, dict) else Grammar.of_format(schema)
    assert grammar is not None
    ids = [*ids_of(text), 257]
    return masks_of(grammar).reach([], ids) == len(ids)


def nested(schema: object) -> dict[str, object]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "inside"),
    [
        (A, "%s"),
        (nested(A), '{"x": %s}'),
        (nested({"anyOf": [A, {"type": "null"}]}), '{"x": %s}'),
        ({**nested({"$ref": "#/$defs/A~1b"}), "$defs": {"A/b": A}}, '{"x": %s}'),
        (nested({"type": "array", "prefixItems": [A], "items": False}), '{"x": [%s]}'),
        (Outer, '{"one": %s, "many": []}'),
        (Outer, '{"one": {"a": 1}, "many": [], "either": %s}'),
        ({"properties": {"default": A}, "required": ["default"]}, '{"default": %s}'),
        ({"properties": {"allOf": A}, "required": ["allOf"]}, '{"allOf": %s}'),
    ],
)
def test_no_other_members(schema: Any, inside: str) -> None:
    assert follows(schema, inside % '{"a": 1}')
    assert not follows(schema, inside % '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**A, "additionalProperties": True}, '{"a": 1, "b": 2}'),
        (Outer, '{"one": {"a": 1}, "many": [], "free": {"b": 2}}'),
        (
            {"properties": {"properties": {}}, "additionalProperties": True},
            '{"additionalProperties": 1}',
        ),
        ({**A, "required": ["a", "b"]}, '{"a": 1, "b": 2}'),
        (
            {"allOf": [A, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
            '{"a": 1, "b": 2}',
        ),
        (
            {**A, "allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": {"properties": {"b": {}}}}},
            '{"a": 1, "b": 2}',
        ),
    ],
)
def test_what_is_said_otherwise(schema: Any, text: str) -> None:
    """Open ones, and objects that are described in several places."""
    assert follows(schema, text)


def test_what_is_no_schema_is_left_as_it_is() -> None:
    odd = {
        "const": dict(A),
        "default": {"properties": {}},
        "properties": [],
        "anyOf": 3,
        "items": True,
    }
    assert closed(json.loads(json.dumps(odd))) == odd
    chain = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"$ref": "#"}]} for i in range(3000)
    }
    assert closed({"$defs": chain, "$ref": "#/$defs/d2999"})["$defs"] == chain
