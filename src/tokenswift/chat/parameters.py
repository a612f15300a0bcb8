"""What the schema of a tool says of its parameters, for calls whose values are written as text.

A schema is a stranger's: what it says in a way that is not read here, it does not say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tokenswift.chat.values import SPACE

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
#: keywords that ask for nothing beside others
NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
#: keywords that hold the schemas that references name
DEFINITIONS = ("$defs", "definitions")
MOST_DEPTH = 16  # of references and unions in each other
MOST_ALTERNATIVES = 64  # of a parameter


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the ways to write a parameter.

    Attributes:
        kind: a type of JSON; "value" (this value alone), "any" (anything that the schema admits).
        schema: of it.
        value: the one, of the kind "value".
    """

    kind: str
    schema: Mapping[str, object]
    value: object = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool.

    Attributes:
        name: its key.
        required: whether a call has to have it.
        alternatives: ways to write it.
    """

    name: str
    required: bool
    alternatives: tuple[Alternative, ...]

    @property
    def types(self) -> frozenset[str]:
        """Types that its value may have."""
        return frozenset().union(*map(_types, self.alternatives))


def parameters_of(schema: Mapping[str, object]) -> list[Parameter]:
    """The parameters that the schema of a tool lists."""
    properties = schema.get("properties")
    required = schema.get("required")
    needed = required if isinstance(required, Sequence) else ()
    listed = properties if isinstance(properties, Mapping) else {}
    return [
        Parameter(name, name in needed, alternatives_of(one, schema))
        for name, one in listed.items()
    ]


def other_parameters(schema: Mapping[str, object]) -> tuple[Alternative, ...] | None:
    """Ways to write a parameter that the schema of a tool does not list; None: it has no others."""
    others = schema.get("additionalProperties", True)
    return None if others is False else alternatives_of(others, schema)


# ---- alternatives --------------------------------------------------------------------------------


def alternatives_of(schema: object, root: Mapping[str, object]) -> tuple[Alternative, ...]:
    """The ways to write what a schema describes.

    Args:
        root: the schema that references in it lead into.
    """
    alternatives = _alternatives(schema, root, 0)
    if not 0 < len(alternatives) <= MOST_ALTERNATIVES:
        return (_anything(schema, root),)
    return tuple(alternatives)


def _alternatives(schema: object, root: Mapping[str, object], depth: int) -> list[Alternative]:
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return [_anything(schema, root)]
    keys = schema.keys() - NOTES - set(DEFINITIONS)
    if keys == {"$ref"}:
        return _alternatives(_referred(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        inner = schema.get(key)
        if keys == {key} and isinstance(inner, list):
            return [one for part in inner for one in _alternatives(part, root, depth + 1)]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return [Alternative("value", {}, value) for value in values]
    kinds = schema.get("type")
    types = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(types, list) or not all(kind in TYPES for kind in types):
        return [_anything(schema, root)]
    return [Alternative(kind, _with_definitions({**schema, "type": kind}, root)) for kind in types]


def _anything(schema: object, root: Mapping[str, object]) -> Alternative:
    held = schema if isinstance(schema, Mapping) and _reaches(schema) else {}
    return Alternative("any", _with_definitions(held, root) if held else {})


def _reaches(schema: object) -> bool:
    """Whether every reference in a schema leads to definitions, which are handed on with it."""
    referred = re.findall(r'"\$ref": "([^"]*)', json.dumps(schema))
    return all(re.match(r"#/(\$defs|definitions)/", reference) for reference in referred)


def _with_definitions(
    schema: Mapping[str, object], root: Mapping[str, object]
) -> Mapping[str, object]:
    if not _reaches(schema):
        return {key: schema[key] for key in ("type",) if key in schema}
    if '"$ref"' not in json.dumps(schema):
        return schema
    return {**schema, **{key: root[key] for key in DEFINITIONS if key in root}}


def _referred(reference: object, root: Mapping[str, object]) -> object:
    """The schema that a reference names; None: there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: object = root
    for part in reference.removeprefix("#/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _types(alternative: Alternative) -> frozenset[str]:
    if alternative.kind == "any":
        return TYPES
    if alternative.kind != "value":
        return frozenset((alternative.kind,))
    value = alternative.value
    if isinstance(value, str):
        return frozenset(("string",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if value is None:
        return frozenset(("null",))
    if isinstance(value, int | float):
        return frozenset(("number",))
    return frozenset(("object", "array"))


# ---- values --------------------------------------------------------------------------------------


def converted(text: str, types: frozenset[str]) -> str:
    """The JSON that a value's text means: of a type that it may have, or else a text.

    Args:
        types: that the schema admits.
    """
    bare = text.strip(SPACE)
    word = bare.lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    if types & {"integer", "number"} and NUMBER.fullmatch(bare):
        return bare
    if types & {"object", "array"} and bare[:1] in ("{", "[") and is_json(bare):
        return bare
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=_refuse)
        return True
    return False


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
