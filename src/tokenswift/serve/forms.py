"""What a request's text has to be like: OpenAI's ``response_format`` and ``text.format``, and vLLM's
``structured_outputs`` and ``guided_*``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from tokenswift.checks import shown
from tokenswift.grammar import Grammar
from tokenswift.types import InputError


def _schema(value: Any) -> Grammar:
    if not isinstance(value, str | Mapping):
        raise InputError(f"the JSON schema is {shown(value)}; valid: a JSON object")
    return Grammar.json_schema(value)


def _object(value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise InputError(f"it is {shown(value)}; valid: true, false")
    return Grammar.json_object() if value else None


def _choice(value: Any) -> Grammar:
    if not isinstance(value, list):
        raise InputError(f"the choice is {shown(value)}; valid: a list of texts")
    return Grammar.choice(value)


#: kinds of vLLM's → what is made of their values
MADE: dict[str, Callable[[Any], Grammar | None]] = {
    "json": _schema,
    "regex": Grammar.regex,
    "choice": _choice,
    "grammar": Grammar.written,
    "json_object": _object,
}


class Formed(BaseModel):
    """The fields of a body that say what the text has to be like."""

    response_format: Any = None
    text: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def is_bound(self) -> bool:
        """Whether there may be a grammar, of tools or of the text, so that one is to be compiled."""
        names = (*Formed.model_fields, "tools")
        return any(getattr(self, name, None) is not None for name in names)

    def grammar(self) -> Grammar | None:
        """The grammar that is asked for; None: any text.

        Raises:
            InputError: naming the field; several are given, or one cannot be read.
        """
        found = self._grammars()
        if len(found) > 1:
            raise InputError(f"{' and '.join(found)} are given; valid: one of them", list(found)[1])
        return next(iter(found.values()), None)

    def in_own_field(self, error: InputError) -> InputError:
        """Why a grammar is refused, with the field that it was made of."""
        return InputError(str(error), next(iter(self._grammars()), "tools").partition(".")[0])

    def _grammars(self) -> dict[str, Grammar]:
        """What is asked for by each field."""
        found: dict[str, Grammar] = {}
        given = {f"guided_{kind}": getattr(self, f"guided_{kind}") for kind in list(MADE)[:4]}
        asked = [(name, name.removeprefix("guided_"), value) for name, value in given.items()]
        for kind, value in (self.structured_outputs or {}).items():
            if kind == "structural_tag" and value:
                raise InputError(
                    f"structured_outputs.{kind} is not served; valid: {', '.join(MADE)}",
                    "structured_outputs",
                )
            asked += [(f"structured_outputs.{kind}", kind, value)] if kind in MADE else []
        for name, kind, value in asked:
            try:
                made = None if value is None else MADE[kind](value)
            except InputError as error:
                raise InputError(f"{name}: {error}", name.partition(".")[0]) from error
            if made is not None:
                found[name] = made
        if self.text is not None and not isinstance(self.text, Mapping):
            raise InputError(f"text is {shown(self.text)}; valid: an object with format", "text")
        inner = self.text.get("format") if self.text else None
        for name, value in (("response_format", self.response_format), ("text.format", inner)):
            if isinstance(value, Mapping) and value.get("type") in ("text", "json_object"):
                if sum(one is not None for one in value.values()) > 1:
                    given = f"{name} of type {value['type']} holds more than its type"
                    valid = "the type alone, or type json_schema"
                    raise InputError(f"{given}; valid: {valid}", name.partition(".")[0])
            try:
                made = Grammar.of_format(value, name)
            except InputError as error:
                raise InputError(str(error), name.partition(".")[0]) from error
            if made is not None:
                found[name] = made
        return found
