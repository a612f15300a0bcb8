"""Objects have no members that their schema does not list, unless it says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.lossless.test_grammar import ids_of, masks_of
from tokenswift import Grammar
from tokenswift.grammar import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Inner(BaseModel):
    a: int


class Outer(BaseModel):
    one: Inner
    many: list[Inner]
    either: Inner | None = None
    free: dict[str, int] = {}


def follows(schema: Any, text: str) -> bool:
    """Whether a text is one of a schema's."""
    grammar = Grammar.of_format(schema) if isinstance(schema, type) else Grammar.json_schema(schema)
    assert grammar is not None
    ids = [*ids_of(text), 257]
    return masks_of(grammar).reach([], ids) == len(ids)


def nested(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "inside"),
    [
        (A, "%s"),
        (nested(A), '{"x": %s}'),
        (nested({"anyOf": [A, {"type": "null"}]}), '{"x": %s}'),
        (nested({"allOf": [A]}), '{"x": %s}'),
        ({**nested({"$ref": "#/$defs/A~1b"}), "$defs": {"A/b": A}}, '{"x": %s}'),
        (nested({"type": "array", "prefixItems": [A], "items": False}), '{"x": [%s]}'),
        (Outer, '{"one": %s, "many": []}'),
        (Outer, '{"one": {"a": 1}, "many": [], "either": %s}'),
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
        ({**A, "required": ["a", "b"]}, '{"a": 1, "b": 2}'),
        ({"allOf": [A, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]}, '{"a": 1, "b": 2}'),
        ({**A, "allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": {"properties": {"b": {}}}}},
         '{"a": 1, "b": 2}'),
    ],
)  # fmt: skip
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
        "$ref": 1,
    }
    assert closed(json.loads(json.dumps(odd))) == odd
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"$ref": "#"}]} for i in range(3000)}
    assert closed({"$defs": chain, "$ref": "#/$defs/d2999"})["$defs"] == chain
