"""What a JSON schema's grammar accepts and refuses: numbers that end, formats, names of members,
limits beyond a double's integers, and schemas that only Lark grammars hold."""

from __future__ import annotations

import enum
import ipaddress
import pathlib
import uuid
from datetime import datetime, timedelta
from typing import Annotated, Literal, TypeAlias

import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.conftest import tiny_tokenizer
from tests.lossless.test_grammar import END, allowed_by, ids_of, masks_of
from tests.sampling.test_grammars import nested
from tokenswift import Grammar, InputError
from tokenswift.sampling import grammars as grammar_masks
from tokenswift.sampling.grammars import Grammars
from tokenswift.sampling.masks import TOO_LONG, NoMask

Schema: TypeAlias = dict[str, object] | bool


def reason_not_held(schema: Schema) -> str | None:
    return Grammars(tiny_tokenizer(), 270, lambda: {END}).reason_not_held(schema)


def is_written(grammar: Grammar, text: str) -> bool:
    """Whether the masks let a text through, token by token, up to its end."""
    masks = masks_of(grammar)
    history: list[int] = []
    for token in [*ids_of(text), END]:
        allowed = allowed_by(masks, history, [])
        if allowed is None or not allowed[token]:
            return False
        history.append(token)
    return True


def check(schema: Schema, accepted: list[str], refused: list[str]) -> None:
    grammar = Grammar.json_schema(schema)
    for text in accepted:
        assert is_written(grammar, text), text
    for text in refused:
        assert not is_written(grammar, text), text


# ---- numbers end ---------------------------------------------------------------------------------

ANY_NUMBER = (
    ["0", "-0", "7", "-12.5", "6.02e23", "1E-7", "1e+308", "9" * 20, f"0.{'3' * 20}"],
    ["9" * 21, f"0.{'3' * 21}", "1e1000", "01", "1.", "+1", f"-{'9' * 21}", "1e0000"],
)


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "number"}, *ANY_NUMBER),
        ({}, *ANY_NUMBER),
        (True, *ANY_NUMBER),
        ({"type": "integer"}, ["0", "-7", "9" * 20, str(2**64 - 1)], ["9" * 21, "1.0", "1e3"]),
        ({"type": "integer", "minimum": 0}, ["0", "9" * 20], ["-1", "1" + "0" * 20]),
        ({"type": "integer", "minimum": -5, "maximum": 120}, ["-5", "99", "120"], ["121", "-6"]),
        ({"type": "number", "minimum": 0}, ["0.5", f"1.{'0' * 20}"], [f"1.{'0' * 21}", "-1"]),
        ({"type": "number", "exclusiveMaximum": 1}, ["0.999", "-9.5"], ["1", f"0.{'9' * 21}"]),
        # as many digits as the limits need
        ({"type": "number", "minimum": 1e-30}, [f"0.{'0' * 29}1"], [f"0.{'0' * 30}1"]),
        ({"const": 10**25}, [str(10**25)], [str(10**24), str(10**26)]),
        # a multiple is always within reach
        ({"type": "integer", "multipleOf": 7}, ["7", "-14"], ["8", "7" * 19]),
        ({"type": "number", "multipleOf": 0.01}, ["19.99", "-3"], ["0.001", "9" * 19]),
    ],
)
def test_numbers_end(schema: Schema, accepted: list[str], refused: list[str]) -> None:
    check(schema, accepted, refused)


@pytest.mark.parametrize("inside", ['{"x": %s}', '{"x": [1, %s]}', '{"x": {"a b\\" 9": %s}}'])
def test_numbers_end_wherever_they_stand(inside: str) -> None:
    check(nested({}), [inside % "1.5", inside % ("9" * 20)], [inside % ("9" * 21)])


def test_digits_of_strings_are_free() -> None:
    check({}, [f'"{"9" * 70}"', f'{{"{"9" * 70}": "a 1{"0" * 30}"}}'], [])
    check({"type": "string", "pattern": "^[0-9]+$"}, [f'"{"9" * 70}"'], [])


@pytest.mark.parametrize("thought", ["", "may", "begun"])
def test_numbers_end_behind_a_thought(thought: str) -> None:
    before = {"": "", "may": "<think>0</think>\n\n", "begun": "0</think>\n\n"}[thought]
    grammar = Grammar("json_schema", '{"type": "integer"}', thought)
    assert is_written(grammar, before + "9" * 20)
    assert not is_written(grammar, before + "9" * 21)


def test_numbers_end_in_schemas_of_a_lark_grammar() -> None:
    """As those of tools are; text around them is free."""
    text = 'start: /[0-9 %a-z]+/ ": " %json {"type": "number"} "!" // %json {"type": "x"}\n'
    assert is_written(Grammar.lark(text), f"{'9' * 30}: -1.5e3!")
    assert is_written(Grammar.lark(text), f"{'9' * 30}: {'9' * 20}!")
    assert not is_written(Grammar.lark(text), f"7: {'9' * 21}!")
    free = Grammar.lark('start: "%json {" /[0-9]+/')
    assert is_written(free, "%json {" + "9" * 30)


def test_a_number_that_cannot_end_is_said_to_be_too_long() -> None:
    """Only multiples of large numbers, which llguidance cannot hold below a limit."""
    masks = masks_of(Grammar.json_schema({"type": "integer", "multipleOf": 20011}))
    with pytest.raises(NoMask, match=TOO_LONG):
        masks.allowed(ids_of("1" * 20), [])


@pytest.mark.parametrize(
    ("form", "accepted", "refused"),
    [
        ("duration", ["P1Y2M3D", "PT36H", "P5W"], [f"PT{'9' * 40}S"]),
        ("time", ["12:30:00Z", "12:30:00.123456789+02:00"], [f"12:30:00.{'1' * 30}Z"]),
        ("date-time", ["2024-02-29T12:30:00.5Z"], [f"2024-02-29T12:30:00.{'1' * 30}Z"]),
    ],
)
def test_times_end(form: str, accepted: list[str], refused: list[str]) -> None:
    schema: Schema = {"type": "string", "format": form}
    check(schema, [f'"{text}"' for text in accepted], [f'"{text}"' for text in refused])


# ---- formats and names ---------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Account(BaseModel):
    home: pathlib.Path
    secret: SecretStr
    photo: bytes
    network: ipaddress.IPv4Network
    key: uuid.UUID


class Measured(BaseModel):
    at: datetime
    took: timedelta
    by_colour: dict[Colour, int]
    by_name: dict[Literal["a", "b"], float]
    by_code: dict[Annotated[str, Field(pattern="^[a-z]{2}$")], bool]


KEY = "123e4567-e89b-12d3-a456-426614174000"


def test_models_of_pydantic() -> None:
    account = Grammar.of_format(Account)
    measured = Grammar.of_format(Measured)
    assert account is not None
    assert measured is not None
    text = '{"home": "/a", "secret": "s", "photo": "b", "network": "10.0.0.0/8", "key": "%s"}'
    assert is_written(account, text % KEY)
    assert not is_written(account, text % "no uuid")
    text = '{"at": "2024-01-01T00:00:00Z", "took": "PT1S", "by_colour": {"red": 1}, "by_name": %s}'
    text = text[:-1] + ', "by_code": {"xy": true}}'
    assert is_written(measured, text % '{"a": 1.5}')
    assert not is_written(measured, text % '{"c": 1.5}')


@pytest.mark.parametrize(
    "form", ["path", "password", "binary", "ipv4network", "int64", "regex", "json-pointer", "?"]
)
def test_an_unknown_format_asks_for_nothing(form: str) -> None:
    check({"type": "string", "format": form}, ['"any text"'], ["1"])


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", "2024-02-29", "2024-02-30"),
        ("email", "a@b.c", "a"),
        ("hostname", "a.b", "a b"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("ipv6", "::1", "1"),
        ("uuid", KEY, KEY[1:]),
        ("uri", "http://a.b/c", "a b"),
    ],
)
def test_known_formats_are_held(form: str, good: str, bad: str) -> None:
    check({"type": "string", "format": form}, [f'"{good}"'], [f'"{bad}"'])


INTEGERS = {"type": "integer"}


@pytest.mark.parametrize(
    ("rule", "accepted", "refused"),
    [
        ({"enum": ["a", "b"]}, ['{"a": 1, "b": 2}', '{"b": 2}', "{}"], ['{"c": 1}', '{"a": "x"}']),
        ({"const": "a"}, ['{"a": 1}'], ['{"b": 1}']),
        ({"$ref": "#/$defs/Name"}, ['{"b": 1}'], ['{"c": 1}']),
        ({"type": "string", "pattern": "^x-"}, ['{"x-a": 1}'], ['{"a": 1}', '{"x-a": "x"}']),
        ({"minLength": 2, "maxLength": 3}, ['{"ab": 1}'], ['{"a": 1}', '{"abcd": 1}']),
        ({"type": "string", "title": "Name"}, ['{"any": 1}'], ['{"any": "x"}']),
        (True, ['{"any": 1}'], ['{"any": "x"}']),
    ],
)
def test_names_of_members(rule: object, accepted: list[str], refused: list[str]) -> None:
    schema = {"type": "object", "propertyNames": rule, "additionalProperties": INTEGERS}
    names = {"Name": {"title": "Name", "type": "string", "enum": ["a", "b"]}}
    check({**schema, "$defs": names}, accepted, refused)


def test_names_of_members_beside_properties() -> None:
    both = {"properties": {"a": {"type": "integer"}, "z": {}}, "propertyNames": {"enum": ["a"]}}
    check(both, ['{"a": 1}', "{}"], ['{"z": 1}', '{"a": "x"}'])


@pytest.mark.parametrize("rule", [{"not": {"const": "a"}}, {"pattern": "^(?=a)"}, 5])
def test_names_that_cannot_be_held_are_refused(rule: object) -> None:
    reason = reason_not_held({"type": "object", "propertyNames": rule})
    assert reason is not None
    assert "propertyNames" in reason or "look-around" in reason


# ---- limits beyond a double's integers -----------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "accepted", "refused"),
    [
        ({"maximum": 2**53}, [2**53], [2**53 + 1]),
        ({"maximum": 2**60}, [2**60], [2**60 + 1]),
        ({"exclusiveMaximum": 2**60 + 1}, [2**60], [2**60 + 1]),
        ({"exclusiveMaximum": 2**60 + 1, "maximum": 5}, [5], [6]),
        ({"exclusiveMinimum": -(2**60) - 1}, [-(2**60)], [-(2**60) - 1]),
        ({"minimum": 2**60}, [2**60, 2**63 - 1], [2**60 - 1]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [2**63 - 1, -(2**62)], [2**63, -(2**63) - 1]),
        ({"exclusiveMaximum": 2**63}, [2**63 - 1], [2**63]),
        ({"maximum": 2**64 - 1}, [2**63 - 1], [2**64]),
        ({"maximum": 10**30}, [2**63 - 1], [10**30 + 1]),
    ],
)
def test_large_limits_hold(rule: dict[str, int], accepted: list[int], refused: list[int]) -> None:
    schema: Schema = {"type": "integer", **rule}
    check(schema, [str(number) for number in accepted], [str(number) for number in refused])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "maximum": 2**53 + 1},
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "integer", "exclusiveMaximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": 2**60},
        {"type": "integer", "maximum": -(2**70)},
        {"type": "integer", "minimum": 2**63},
        {"type": "number", "maximum": 2**53 + 1},
        {"type": "number", "maximum": 2**60},
        {"minimum": -(10**400)},
        {"const": 2**53 + 1},
        {"enum": [1, 2**60 + 1]},
        {"enum": [[{"a": 10**400}]]},
    ],
)
def test_numbers_that_would_be_rounded_are_refused(schema: dict[str, object]) -> None:
    with pytest.raises(
        InputError, match=r"(is -?\d+…?, which would be|no integer of 64 bits)"
    ) as no:
        masks_of(Grammar.json_schema(nested(schema)))
    assert "\n" not in str(no.value)


# ---- whether a schema can be held ----------------------------------------------------------------


@pytest.mark.parametrize(
    "schema", [True, {}, {"type": "object"}, nested({"format": "path"}), {"type": "integer"}]
)
def test_schemas_that_can_be_held(schema: Schema) -> None:
    assert reason_not_held(schema) is None


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (nested({"type": "string", "pattern": "^(?=a)b"}), "look-around"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        (False, "the JSON schema is False"),
        ({"type": "integer", "multipleOf": 104729, "maximum": 10**15}, "too many expressions"),
        ({"maximum": 2**53 + 1}, "would be rounded"),
    ],
)
def test_why_a_schema_cannot_be_held(schema: Schema, says: str) -> None:
    for _ in range(2):  # the second answer is remembered
        reason = reason_not_held(schema)
        assert reason is not None
        assert says in reason
        assert "\n" not in reason


def test_multiples_are_tried_as_deep_as_numbers_go() -> None:
    """Refused before anything is decoded, though the first mask would come."""
    number = {"type": "integer", "multipleOf": 104729, "maximum": 10**15}
    with pytest.raises(InputError, match="cannot be compiled .*too many expressions"):
        masks_of(Grammar.json_schema({**nested({"type": "array", "items": number})}))


def test_a_trial_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is held, and for what llguidance refuses."""
    schemas = [nested({"enum": ["once"]}), nested({"pattern": "^(?=once)"})]
    reasons = [reason_not_held(schema) for schema in schemas]
    monkeypatch.setattr(grammar_masks, "Process", None)
    assert [reason_not_held(schema) for schema in schemas] == reasons
