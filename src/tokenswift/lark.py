"""JSON schemas within Lark grammars."""

from __future__ import annotations

import json
import re

from tokenswift.json_schema import EXPONENT_DIGITS, Digits, Schema

#: strings, expressions and comments of Lark, which hold no schema, and what begins one
_LARK = re.compile(
    r"//[^\n]*|#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|/(?:\\.|[^/\\\n])+/|(?P<schema>%json\s*)(?=\{)"
)


def lark_parts(text: str) -> tuple[list[str], list[Schema]]:
    """A Lark grammar's text around the JSON schemas in it (``%json {…}``), and these schemas: one
    fewer than there are parts.

    Raises:
        ValueError: one of them is not JSON.
    """
    parts: list[str] = []
    schemas: list[Schema] = []
    begin = at = 0
    while match := _LARK.search(text, at):
        at = match.end()
        if match["schema"]:
            parts.append(text[begin : match.start()])
            schema, at = json.JSONDecoder().raw_decode(text, at)
            schemas.append(schema)
            begin = at
    return [*parts, text[begin:]], schemas


#: a rule of Lark for any JSON, however it is spaced, whose numbers end
_VALUE = "tokenswift_json"


def lark_with(parts: list[str], schemas: list[Schema]) -> str:
    """The Lark grammar of such parts and schemas."""
    texts = [f"%json {json.dumps(schema, ensure_ascii=False)}" for schema in schemas]
    return "".join(part + text for part, text in zip(parts, [*texts, ""], strict=True))


def lark_of_numbers(parts: list[str], digits: Digits) -> str:
    """A Lark grammar in which any JSON may stand between the parts, with numbers of so many digits:
    together with the grammar of the schemas, it bounds their numbers."""
    space = r"[ \t\r\n]*"
    number = rf"-?(0|[1-9][0-9]{{0,{digits.integer - 1}}})(\.[0-9]{{1,{digits.fraction}}})?"
    exponent = rf"([eE][+-]?[0-9]{{1,{EXPONENT_DIGITS}}})?"
    rules = f"""
{_VALUE}: {_VALUE}_object | {_VALUE}_array | {_VALUE}_scalar
{_VALUE}_scalar: TOKENSWIFT_STRING | TOKENSWIFT_NUMBER | "true" | "false" | "null"
{_VALUE}_object: TOKENSWIFT_OPEN {_VALUE}_members? TOKENSWIFT_CLOSE
{_VALUE}_members: {_VALUE}_member (TOKENSWIFT_COMMA {_VALUE}_member)*
{_VALUE}_member: TOKENSWIFT_STRING TOKENSWIFT_COLON {_VALUE}
{_VALUE}_array: TOKENSWIFT_BEGIN ({_VALUE} (TOKENSWIFT_COMMA {_VALUE})*)? TOKENSWIFT_END
TOKENSWIFT_STRING: /"(\\\\(.|\\n)|[^"\\\\])*"/
TOKENSWIFT_NUMBER: /{number}{exponent}/
TOKENSWIFT_OPEN: /\\{{{space}/
TOKENSWIFT_CLOSE: /{space}\\}}/
TOKENSWIFT_BEGIN: /\\[{space}/
TOKENSWIFT_END: /{space}\\]/
TOKENSWIFT_COMMA: /{space},{space}/
TOKENSWIFT_COLON: /{space}:{space}/
"""
    return _VALUE.join(parts) + rules
