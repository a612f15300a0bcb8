"""What a text has to be like: a JSON schema, a regular expression, a choice, or a grammar. Light:
nothing is compiled here (`sampling.masks` does), and a value can be kept in a journal and
compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenswift.checks import check_choice, check_text, depth_and_size, shown
from tokenswift.json_schema import closed as closed
from tokenswift.types import InputError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: marks around what a model thinks before it answers
OPEN = "<think>"
CLOSE = "</think>"
TITLES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
#: limits of a grammar, beyond any schema that is worth its masks
MOST_CHARACTERS = 1 << 19
MOST_DEPTH = 64  # objects and lists in each other
MOST_ITEMS = 20_000  # values
#: JSON spaced as Python writes it: with free spacing, a small model may write spaces for ever
SPACING: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
MOST = (
    f"{MOST_CHARACTERS:,} characters, {MOST_ITEMS:,} values, {MOST_DEPTH} levels of objects "
    f"and lists"
)
FORMATS = (
    '{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": '
    '{"schema": {…}}}'
)
RECORDS = (
    f'a Grammar, or an object such as {{"kind": "regex", "text": "[0-9]+"}}; kinds: '
    f"{', '.join(TITLES)}"
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text has to be like. `json_schema` and the other constructors make one.

    Attributes:
        kind: json_schema, regex or lark
        text: the schema as JSON, or the expression or grammar itself
        thought: what may come before: "may" (a thought between `OPEN` and `CLOSE`), "begun" (the
            rest of one)

    Raises:
        InputError: another kind, no text, or one that is too long, too deep or has too many parts.
    """

    kind: str
    text: str
    thought: str = ""

    def __post_init__(self) -> None:
        check_choice("grammar.kind", self.kind, tuple(TITLES))
        check_choice("grammar.thought", self.thought, ("", "may", "begun"))
        if not isinstance(self.text, str) or not self.text:
            raise InputError(
                f"the {TITLES[self.kind]} is {shown(self.text)}; valid: text", "grammar"
            )
        is_large = len(self.text) > MOST_CHARACTERS
        check_text("grammar", self.text)
        if self.kind == "json_schema" and not is_large:
            depth, count = depth_and_size(_schema(self.text), MOST_DEPTH)
            is_large = depth > MOST_DEPTH or count > MOST_ITEMS
        if is_large:
            raise InputError(
                f"the {TITLES[self.kind]} is too large; valid: up to {MOST}", "grammar"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | str | bool) -> Grammar:
        """JSON that a schema describes, an object of Python or JSON text; members stand in its
        order. True is any JSON."""
        return cls(
            "json_schema",
            schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False),
        )

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """Text that a regular expression matches from end to end, in the syntax of Rust's crate
        ``regex``, without look-around."""
        return cls("regex", text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts.

        Raises:
            InputError: they are none.
        """
        choices = [*texts] if isinstance(texts, Iterable) and not isinstance(texts, str) else []
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise InputError(
                f"the choice is {shown(texts)}; valid: texts, none of them empty", "grammar"
            )
        return cls("regex", "|".join(map(re.escape, choices)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of a context-free grammar in Lark's syntax, as llguidance describes it."""
        return cls("lark", text)

    def record(self) -> dict[str, str]:
        """The JSON object that :meth:`of` makes it from."""
        record = {"kind": self.kind, "text": self.text}
        if self.thought:
            record["thought"] = self.thought
        return record

    @classmethod
    def of(cls, value: object) -> Grammar | None:
        """A grammar from its record; a grammar and None are what they are.

        Raises:
            InputError: it is anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and value.keys() | {"thought"} == {"kind", "text", "thought"}:
            return cls(**value)
        raise InputError(f"grammar is {shown(value)}; valid: {RECORDS}", "grammar")

    @classmethod
    def of_format(cls, value: object, name: str = "response_format") -> Grammar | None:
        """What a ``response_format`` asks for, in the form of OpenAI's chats or of its responses
        (where the schema stands beside the type), or a class of pydantic; None: any text.

        Raises:
            InputError: it is anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, type):
            schema_of_class = getattr(value, "model_json_schema", None)
            schema = schema_of_class() if callable(schema_of_class) else None
            if isinstance(schema, Mapping):
                return cls.json_schema(schema)
        wanted = value if isinstance(value, Mapping) else {}
        kind = wanted.get("type")
        if kind == "text":
            return None
        if kind == "json_object" and not wanted.get("schema"):
            return cls.json_object()
        if kind in ("json_schema", "json_object"):  # with a schema, as llama.cpp's clients send it
            inner = wanted.get("json_schema", wanted)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if isinstance(schema, Mapping) or schema is True:
                return cls.json_schema(schema)
        raise InputError(f"{name} is {shown(value)}; valid: {FORMATS}", name)


def _schema(text: str) -> object:
    """A JSON schema from its text.

    Raises:
        InputError: it is none.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the JSON schema is {shown(text)}; valid: JSON ({error})", "grammar"
        ) from error
    if not isinstance(schema, dict) and schema is not True:
        valid = "a JSON object, or true for any JSON"
        raise InputError(f"the JSON schema is {shown(schema)}; valid: {valid}", "grammar")
    return schema
