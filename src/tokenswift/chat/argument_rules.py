"""Rules of a grammar that hold the arguments of a call to their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from tokenswift.chat.parameters import (
    Alternative,
    Parameter,
    other_parameters,
    parameters_of,
)
from tokenswift.grammar import SPACING
from tokenswift.loader.call_arguments import (
    KEY,
    PYTHON_WORDS,
    XML_CLOSING,
    XML_OPENING,
    Form,
    json_text,
    python_text,
    xml_opening,
    xml_text,
)

#: what ends a value, so that no text may hold it
XML_END = "</parameter>"
_ANY_TEXT = r"/(.|\n)*/"
_NO_END = r"~/(.|\n)*<\/parameter>(.|\n)*/"
_XML_KEY = r"[^<>\n]{1,64}"
_PYTHON_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
WORDS = {"boolean": ("true", "false"), "null": ("null",)}


def json_rule(schema: Mapping[str, object]) -> str:
    """JSON that a schema describes, in a grammar's rule."""
    options = schema.get("x-guidance")
    guidance = {**(options if isinstance(options, Mapping) else {}), **SPACING}
    return "%json " + json.dumps({**schema, "x-guidance": guidance}, ensure_ascii=False)


class ArgumentRules:
    """Writes the rules of a tool's arguments.

    Args:
        prefix: of the names of rules.
        form: how arguments are written, "xml" or "python".

    Attributes:
        rules: those that `written` refers to.
    """

    def __init__(self, prefix: str, form: Form) -> None:
        self._prefix = prefix
        self._is_xml = form == "xml"
        self._guidance: object = None  # what the tool's schema says of how it is read
        self.rules: list[str] = []

    def written(self, schema: Mapping[str, object]) -> str:
        """All arguments: those that the schema lists in its order, then others where it has such.

        Args:
            schema: of an object.
        """
        self._guidance = schema.get("x-guidance")
        parameters = parameters_of(schema)
        parts = [self._parameter(parameter) for parameter in parameters]
        others = self._others(schema, [parameter.name for parameter in parameters])
        if self._is_xml:
            paired = zip(parts, parameters, strict=True)
            needed = [part if one.required else f"{part}?" for part, one in paired]
            return " ".join([*needed, f"{others}*"] if others else needed)
        return self._separated(parts, parameters, others)

    def _separated(self, parts: Sequence[str], parameters: Sequence[Parameter], others: str) -> str:
        """Arguments with commas in between, whichever is the first."""
        behind = f'(", " {others})*' if others else ""
        first = f"({others} {behind})?" if others else ""
        for part, parameter in zip(reversed(parts), reversed(parameters), strict=True):
            begun = f"{part} {behind}"
            if parameter.required:
                first = begun
                behind = self._rule(f'", " {part} {behind}')
            else:
                first = f"({begun} | {first})" if first else f"({begun})?"
                behind = self._rule(f'(", " {part})? {behind}')
            first = self._rule(first)
        return first

    def _parameter(self, parameter: Parameter) -> str:
        """The rule of an argument; its name."""
        opening = xml_opening(parameter.name) if self._is_xml else f"{parameter.name}="
        value = self._value(parameter.alternatives)
        return self._rule(f"{_quoted(opening)} {value}")

    def _others(self, schema: Mapping[str, object], known: Sequence[str]) -> str:
        """The rule of an argument that the schema does not list; "": there are none."""
        alternatives = other_parameters(schema)
        if alternatives is None:
            return ""
        before, key, behind = (XML_OPENING if self._is_xml else f"{KEY}=").partition(KEY)
        pattern = _XML_KEY if self._is_xml else _PYTHON_KEY
        behind = behind.replace("\n", r"\n")
        opening = _slashed(f"{before}{pattern}{behind}")
        if known:
            names = "|".join(map(re.escape, known)).replace("\\\n", r"\n")
            opening += f" & ~{_slashed(f'{before}({names}){behind}')}"
        terminal = self._terminal(opening)
        return self._rule(f"{terminal} {self._value(alternatives)}")

    def _value(self, alternatives: Sequence[Alternative]) -> str:
        """A value, and what stands behind it."""
        if not self._is_xml:
            return f"({' | '.join(map(self._python, alternatives))})"
        texts = [one for one in alternatives if one.kind in ("string", "any")]
        if any(_is_free(one) for one in texts):
            return self._text({})
        closed = [self._text(one.schema) for one in texts]
        others = [self._xml(one) for one in alternatives if one not in texts]
        others = [one for one in others if one]
        if others:
            closed.append(f"({' | '.join(others)}) {_quoted(XML_CLOSING)}")
        return f"({' | '.join(closed)})" if closed else self._text({})

    def _xml(self, one: Alternative) -> str:
        """A value that is no free text; "": none can be written."""
        if one.kind == "value":
            text = xml_text(one.value)
            return "" if XML_END in text else _quoted(text) or '""'
        words = WORDS.get(one.kind)
        if words is None:
            return self._rule(json_rule({**one.schema, "x-guidance": self._guidance}))
        return " | ".join(_quoted(word) for each in words for word in (each, PYTHON_WORDS[each]))

    def _python(self, one: Alternative) -> str:
        if one.kind == "value":
            return _quoted(python_text(one.value))
        words = WORDS.get(one.kind)
        if words is None:
            return self._rule(json_rule({**one.schema, "x-guidance": self._guidance}))
        return " | ".join(_quoted(PYTHON_WORDS[word]) for word in words)

    def _text(self, schema: Mapping[str, object]) -> str:
        """A text as it is, and what stands behind it."""
        parts = [_ANY_TEXT, _NO_END]
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", "")
        if least or most != "":
            parts.append(rf"/(.|\n){{{least},{most}}}/")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            parts.append(_slashed(_searched(pattern)))
        terminal = self._terminal(" & ".join(parts))
        return self._rule(f"{terminal} {_quoted(XML_CLOSING)}", "[lazy]")

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"{self._prefix}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"{self._prefix}{len(self.rules)}".upper()
        self.rules.append(f"{name}: {body}")
        return name


def _is_free(one: Alternative) -> bool:
    """Whether an alternative admits any text."""
    return one.kind == "any" or not one.schema.keys() & {"minLength", "maxLength", "pattern"}


def _searched(pattern: str) -> str:
    """An expression of texts in which a schema's pattern occurs."""
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    behind = "" if ends else r"(.|\n)*"
    return f"{before}({pattern.removeprefix('^')[: -1 if ends else None]}){behind}"


def _slashed(expression: str) -> str:
    """A regular expression in a grammar."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression) + "/"


def _quoted(text: str) -> str:
    return json_text(text) if text else ""
