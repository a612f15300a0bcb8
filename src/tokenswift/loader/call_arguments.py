"""How families write the arguments of a call: as JSON, as XML or as Python does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, TypeAlias

Form: TypeAlias = Literal["json", "xml", "python"]

#: what stands around an argument that is written as XML, whose key is `KEY`; a value is in between
KEY = "KEY"
XML_OPENING = "<parameter=KEY>\n"
XML_CLOSING = "\n</parameter>\n"
#: JSON's words for which Python has others
PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
EXAMPLES: dict[Form, str] = {
    "json": "{…}",
    "xml": f"{XML_OPENING}…{XML_CLOSING}",
    "python": f"{KEY}=…",
}


def spelled_arguments(arguments: object, form: Form) -> str:
    """Arguments as an answer has them.

    Args:
        arguments: an object or, where they are none (as a call's that was cut), text.
    """
    if form == "json":
        return json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, Mapping):
        return str(arguments)
    if form == "python":
        return ", ".join(f"{key}={python_text(value)}" for key, value in arguments.items())
    texts = ((key, xml_text(value)) for key, value in arguments.items())
    return "".join(f"{xml_opening(key)}{text}{XML_CLOSING}" for key, text in texts)


def xml_opening(key: str) -> str:
    """What stands before the value of a key."""
    return XML_OPENING.replace(KEY, key)


def xml_text(value: object) -> str:
    """A value between its marks: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def python_text(value: object) -> str:
    """A value as Python writes it, with the quotes and escapes of JSON."""
    if isinstance(value, Mapping):
        members = (f"{json_text(str(key))}: {python_text(one)}" for key, one in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(python_text, value))}]"
    text = json_text(value)
    return PYTHON_WORDS.get(text, text)


def json_text(value: object) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)
