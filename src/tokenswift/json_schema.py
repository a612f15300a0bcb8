"""JSON schemas in the form in which llguidance holds texts to them exactly.

llguidance refuses some keywords that ask for little (formats that it does not know, names of
members), keeps limits of numbers as doubles, and lets numbers go on for ever. What can be said in
other words is rewritten here; what would be held inexactly is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

#: an object of JSON, in which strangers may have put anything
Schema: TypeAlias = dict[str, object]
#: keywords that describe members of an object, those that hold schemas by name, and those that hold
#: none
_SEVERAL = {"properties", "$ref", "anyOf", "oneOf", "if", "dependentSchemas"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}
#: keywords that ask for nothing
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}

#: formats of strings that llguidance holds; any other asks for nothing
FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
#: digits that a number may have, unless the schema names a longer one
INTEGER_DIGITS = 20  # before its point
FRACTION_DIGITS = 20  # behind it
EXPONENT_DIGITS = 3
#: characters of the formats in which digits could go on for ever, at most
_FORMAT_LENGTHS = {"duration": 40, "time": 35, "date-time": 46}

_EXACT = 2**53  # integers up to this size are doubles
#: an integer's limits that llguidance can hold
_MOST = 2**63 - 1
_LEAST = -(2**63) + 1024
_MULTIPLES_BELOW = 10**18  # size of multiples without limits, at most
_EASY_DIVISOR = 1000  # of these, automata of multiples below a limit are small
_UPPER = ("maximum", "exclusiveMaximum")
_LOWER = ("minimum", "exclusiveMinimum")
_REFERENCES = 16  # from one to another, at most


@dataclass(frozen=True, slots=True)
class Digits:
    """Digits that a number may have.

    Attributes:
        integer: before its point.
        fraction: behind it.
    """

    integer: int = INTEGER_DIGITS
    fraction: int = FRACTION_DIGITS

    def including(self, value: object) -> Digits:
        """As many as these, and those of each number within a JSON value."""
        digits = self
        for number in _numbers(value):
            exponent = Decimal(repr(number)).as_tuple()
            places = int(exponent.exponent)
            integer = len(exponent.digits) + places
            digits = Digits(max(digits.integer, integer), max(digits.fraction, -places))
        return digits


def _numbers(value: object) -> Iterator[int | float]:
    """The finite numbers within a JSON value."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, float) and math.isfinite(value):
        yield value


def closed(schema: Schema) -> Schema:
    """A JSON schema, changed in place, whose objects have no members that it does not list, unless
    it says so. One that describes members of some object in several places, as by ``allOf``, is
    left as it is."""
    objects = list(_objects(schema))
    if any("allOf" in one or len(one.keys() & _SEVERAL) > 1 for one in objects):
        return schema
    for one in objects:
        listed = one.get("properties")
        needed = one.get("required", [])
        says = one.keys() & {"additionalProperties", "unevaluatedProperties"}
        if isinstance(listed, dict) and isinstance(needed, list) and not says:
            if all(isinstance(name, str) and name in listed for name in needed):
                one["additionalProperties"] = False
    return schema


def _objects(value: object, by_name: bool = False) -> Iterator[Schema]:
    """The JSON objects of a schema, those of its values left out; ``by_name``: it holds schemas by
    name."""
    if isinstance(value, dict):
        if not by_name:
            yield value
        for key, inner in value.items():
            if by_name or key not in _VALUES:
                yield from _objects(inner, key in _BY_NAME and not by_name)
    for inner in value if isinstance(value, list) else ():
        yield from _objects(inner)


def compilable(schema: Schema) -> Schema:
    """A schema, changed in place, in the words that llguidance holds exactly.

    Raises:
        ValueError: a number in it is not a double, so that it would not be held exactly.
    """
    for one in list(_objects(schema)):
        _bound_format(one)
        _list_names(one, schema)
        _check_numbers(one)
        _bound_integer(one)
        _bound_multiples(one)
    return schema


def multiples(schema: Schema) -> list[Schema]:
    """What a schema says about multiples of numbers, each as a schema of its own: their automata
    can outgrow llguidance's limits far into a text."""
    keys = ("type", "multipleOf", *_UPPER, *_LOWER)
    rules: list[Schema] = []
    for one in _objects(schema):
        if "multipleOf" in one:
            rule = {key: one[key] for key in keys if key in one}
            rule["type"] = "integer" if rule.get("type") == "integer" else "number"
            if rule not in rules:
                rules.append(rule)
    return rules


# ---- strings and names ---------------------------------------------------------------------------


def _bound_format(one: Schema) -> None:
    """An unknown format goes; one of times gets a length."""
    form = one.get("format")
    if not isinstance(form, str):
        return
    if form not in FORMATS:
        del one["format"]
    if form not in _FORMAT_LENGTHS or one.keys() & {"const", "enum"}:
        return
    most = one.get("maxLength")
    longest = _FORMAT_LENGTHS[form]
    if most is None or (isinstance(most, int) and most > longest):
        one["maxLength"] = longest


def _list_names(one: Schema, schema: Schema) -> None:
    """``propertyNames`` in other words: names of a list become ``properties``, others
    ``patternProperties``; what cannot be said so is left for llguidance to refuse."""
    if "propertyNames" not in one:
        return
    rule = _name_rule(one["propertyNames"], schema)
    values = one.get("additionalProperties", True)
    if rule == {}:
        del one["propertyNames"]
        return
    names = _listed_names(rule)
    if names is not None and "patternProperties" not in one:
        listed = one.get("properties", {})
        if not isinstance(listed, dict):
            return
        members = {name: inner for name, inner in listed.items() if name in names}
        if values is not False:
            members |= {name: values for name in names if name not in members}
        one["properties"] = members
    elif pattern := _name_pattern(rule, one):
        one["patternProperties"] = {pattern: values}
    else:
        return
    one["additionalProperties"] = False
    del one["propertyNames"]


def _name_rule(rule: object, schema: Schema) -> Schema | None:
    """What ``propertyNames`` asks for, references followed and notes left out; None: no schema."""
    for _ in range(_REFERENCES):
        if rule is True:
            return {}
        if not isinstance(rule, dict):
            return None
        rule = {key: value for key, value in rule.items() if key not in _NOTES}
        if rule.get("type") == "string":
            del rule["type"]
        if rule.keys() != {"$ref"}:
            _bound_format(rule)
            return rule
        rule = _referred(rule["$ref"], schema)
    return None


def _referred(address: object, schema: Schema) -> object:
    """What a reference within a schema names; None: nothing."""
    if not isinstance(address, str) or not address.startswith("#/"):
        return None
    place: object = schema
    for part in address[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, dict) or name not in place:
            return None
        place = place[name]
    return place


def _listed_names(rule: Schema | None) -> list[str] | None:
    """The names that a rule lists, where it does no more than that."""
    if rule is None or rule.keys() not in ({"enum"}, {"const"}):
        return None
    names = rule["enum"] if "enum" in rule else [rule["const"]]
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else None


def _name_pattern(rule: Schema | None, one: Schema) -> str | None:
    """The expression of names that a rule allows; None: it is no such rule, or the schema names
    members besides."""
    if rule is None or one.get("properties") or "patternProperties" in one:
        return None
    if rule.keys() == {"pattern"} and isinstance(rule["pattern"], str):
        return rule["pattern"]
    least = rule.get("minLength", 0)
    most = rule.get("maxLength", "")
    lengths = isinstance(least, int) and (most == "" or isinstance(most, int))
    if rule.keys() <= {"minLength", "maxLength"} and lengths:
        return rf"^[\s\S]{{{least},{most}}}$"
    return None


# ---- numbers -------------------------------------------------------------------------------------


def _check_numbers(one: Schema) -> None:
    """Refuse numbers that llguidance would round.

    Raises:
        ValueError: see `compilable`.
    """
    for key in ("const", "enum"):
        for number in _numbers(one.get(key)):
            _check_exact(key, number)
    if not _is_integer(one):
        for key in (*_UPPER, *_LOWER):
            limit = _large(one.get(key))
            if limit is not None and not _is_written_exactly(limit):
                raise ValueError(_inexact(key, limit))


def _check_exact(key: str, number: int | float) -> None:
    """Refuse an integer that llguidance would round. It has integers as doubles, and writes these
    as integers of 64 bits where they are, others in the fewest digits that name the double.

    Raises:
        ValueError: see `compilable`.
    """
    exact = float(number) == number if abs(number) <= _MOST else _is_written_exactly(number)
    if isinstance(number, int) and not exact:
        raise ValueError(_inexact(key, number))


def _is_written_exactly(number: int | float) -> bool:
    """Whether the fewest digits that name the double nearest to an integer are that integer's."""
    try:
        return int(Decimal(repr(float(number)))) == number
    except OverflowError:
        return False


def _inexact(key: str, number: int | float) -> str:
    return f"{key} is {_short(number)}, which would be rounded: integers are exact up to 2^53"


def _short(number: int | float) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _is_integer(one: Schema) -> bool:
    """Whether the numbers of a schema are integers alone."""
    kind = one.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds


def _bound_integer(one: Schema) -> None:
    """An integer's limits beyond those of 64 bits become these, as far as llguidance holds them.

    Raises:
        ValueError: a limit between is not a double, or no integer of 64 bits is within it.
    """
    if not _is_integer(one):
        return
    _make_inclusive(one, "exclusiveMaximum", "maximum")
    _make_inclusive(one, "exclusiveMinimum", "minimum")
    most = _large(one.get("maximum"))
    least = _large(one.get("minimum"))
    if (most or 0) < _LEAST or (least or 0) > _MOST:
        limits = f"minimum {_short(least or 0)} and maximum {_short(most or 0)}"
        raise ValueError(f"no integer of 64 bits is within the limits: {limits}")
    if most is not None:
        one["maximum"] = min(most, _MOST)
        if most < _MOST:
            _check_exact("maximum", most)
    if least is not None:
        one["minimum"] = max(least, _LEAST)
        if least > _LEAST:
            _check_exact("minimum", least)
        if least > 0 and "maximum" not in one:
            one["maximum"] = _MOST  # without one, llguidance computes beyond 64 bits


def _make_inclusive(one: Schema, exclusive: str, inclusive: str) -> None:
    """A large limit that excludes itself becomes the next one that does not: llguidance would add
    to a double."""
    limit = _large(one.get(exclusive))
    if limit is None:
        return
    upper = inclusive == "maximum"
    limit += -1 if upper else 1
    other = _number(one.get(inclusive), limit)
    one[inclusive] = min(other, limit) if upper else max(other, limit)
    del one[exclusive]


def _large(limit: object) -> int | None:
    """An integral limit beyond a double's exact integers; None: any other value."""
    number = _number(limit, 0)
    is_large = abs(number) > _EXACT and abs(number) != math.inf
    return int(number) if is_large else None


def _bound_multiples(one: Schema) -> None:
    """Limits for multiples of a small number that have none: within the digits that a number may
    have, a multiple must be possible."""
    divisor = one.get("multipleOf")
    if not isinstance(divisor, int | float) or isinstance(divisor, bool) or not divisor > 0:
        return
    digits = Decimal(repr(divisor)).normalize().as_tuple().digits
    if divisor > _EASY_DIVISOR or int("".join(map(str, digits))) > _EASY_DIVISOR:
        return
    sizes = [abs(_number(one.get(key), 0)) for key in (*_UPPER, *_LOWER)]
    if max(sizes) > _MULTIPLES_BELOW // 10:
        return
    if not one.keys() & set(_UPPER):
        one["maximum"] = _MULTIPLES_BELOW
    if not one.keys() & set(_LOWER):
        one["minimum"] = -_MULTIPLES_BELOW


def _number(value: object, default: int) -> int | float:
    """A limit, or the default where there is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
