"""Messages of a chat, checked and in one form, whatever form of OpenAI's interface they came in.

Everything in them is a stranger's. A role becomes a part of the prompt's own marks, so only those
that exist are taken; contents, names and arguments stay text (`apart.set_apart`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypedDict, TypeGuard

from tokenswift.checks import check_text, shown
from tokenswift.loader.abilities import Turns
from tokenswift.types import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
#: types of a message's parts → the key of their text
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
#: fields of a client's message that a template may read
CLIENT_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
MOST_CALLS = 128  # of a message
MOST_LETTERS = 128  # of a call's id, and of its name
VALID = "a message such as {'role': 'user', 'content': 'Hello'}"
CALL = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{}'}}"
#: a comparison of a role in a template: with a text, or with a list of texts
COMPARED = re.compile(
    r"""role['"\])]*(?:\s*\|\s*lower)?\s*(?:==|!=|(?:not\s+)?in)\s*(['"]\w+['"]|[\[(][^\])]{0,200})"""
)
QUOTED = re.compile(r"""['"]([a-z][a-z_]{0,31})['"]""")


class CalledFunction(TypedDict):
    """What a call calls; arguments that are no JSON object stay text."""

    name: str
    arguments: str | dict[str, object]


class TemplateCall(TypedDict):
    """A call of a tool as chat templates take it."""

    id: str
    type: str
    function: CalledFunction


def field_of(place: str) -> str:
    """The field that a place lies in: ``messages`` of ``messages[0].content``."""
    return re.split(r"[.\[]", place, maxsplit=1)[0]


# ---- contents and roles --------------------------------------------------------------------------


def joined(content: object) -> object:
    """The text of a message's content: itself, or of parts such as ``{"type": "text", "text":
    "Hello"}``; anything else as it is."""
    if not isinstance(content, list | tuple) or not content:
        return content
    texts = [part_text(part) for part in content]
    known = [text for text in texts if text is not None]
    return "".join(known) if len(known) == len(texts) else content


def part_text(part: object) -> str | None:
    """The text of a part of a content; None: it is no text."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    key = PARTS.get(kind) if isinstance(kind, str) else None
    text = None if key is None else part.get(key)
    return text if isinstance(text, str) else None


def joined_parts(content: object, place: str) -> object:
    """The text of a client's content, "" of a list without parts; what is no list as it is.

    Args:
        place: its name, such as ``messages[0].content``.
    Raises:
        InputError: a part is no text.
    """
    for part in content if isinstance(content, list) else ():
        if part_text(part) is None:
            kind = part.get("type") if isinstance(part, Mapping) else None
            wrong = shown(part if kind is None else kind)
            raise InputError(f"{place} holds a part of type {wrong}; valid: text", field_of(place))
    return "" if content == [] else joined(content)


def template_role(role: str) -> str:
    """A role as chat templates know it."""
    return "system" if role == "developer" else role


def roles_of(template: str) -> list[str]:
    """The roles that a message may have: those of OpenAI's interface, and those that a template
    compares a message's role with."""
    roles = list(ROLES)
    for compared in COMPARED.findall(template):
        roles += QUOTED.findall(compared)
    return list(dict.fromkeys(roles))


# ---- a client's messages -------------------------------------------------------------------------


def plain_message(message: Mapping[str, object], place: str) -> dict[str, object]:
    """A client's message in the form that `checked` takes: a text as its content, and no fields
    but those that a template may read.

    Args:
        place: its name, such as ``messages[0]``.
    Raises:
        InputError: it has no role, or holds something else than text, or nothing at all.
    """
    plain = {name: message[name] for name in CLIENT_FIELDS if message.get(name) is not None}
    role = message.get("role")
    if not isinstance(role, str):
        valid = ", ".join(ROLES)
        raise InputError(f"{place}.role is {_or_missing(role)}; valid: {valid}", field_of(place))
    plain["role"] = template_role(role)
    content = joined_parts(message.get("content"), f"{place}.content")
    if role == "assistant":
        content = content or message.get("refusal") or ""
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought:
            plain["reasoning_content"] = thought
    plain["content"] = client_text(content, f"{place}.content")
    if role == "tool" and message.get("name") is not None:
        plain["name"] = message["name"]  # where its call is not in the conversation
    return plain


def client_text(content: object, place: str) -> str:
    """A client's content, which has to be text.

    Raises:
        InputError: it is something else, or missing.
    """
    text = joined_parts(content, place)
    if not isinstance(text, str):
        raise InputError(f"{place} is {_or_missing(text)}; valid: text", field_of(place))
    return text


def _or_missing(value: object) -> str:
    return "missing" if value is None else shown(value)


# ---- messages for a template ---------------------------------------------------------------------


def checked(messages: Sequence[object], name: str, template: str = "") -> Turns:
    """Messages with texts as contents, calls with arguments as objects, and results with the name
    of what was called.

    Arguments that are no JSON object, such as those of a call that was cut by the length, stay
    text. A result whose call is not in the conversation says the name of its tool in its text.

    Args:
        messages: in the form of OpenAI's interface.
        name: of the argument, in errors.
        template: of the model's chats, which may know further roles.
    Raises:
        InputError: a message, a role, a call or a result that is none; it names the argument.
    """
    tool_names: dict[str, str] = {}
    return [
        _turn(message, f"{name}[{i}]", name, template, tool_names)
        for i, message in enumerate(messages)
    ]


def _turn(
    message: object, place: str, name: str, template: str, tool_names: dict[str, str]
) -> dict[str, object]:
    """A checked message.

    Args:
        tool_names: ids of earlier calls with the names of their tools; those of this message are
            added.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise InputError(f"{place} is {shown(message)}; valid: {VALID}", name)
    turn: dict[str, object] = dict(message)
    role = _checked_role(turn["role"], place, name, template)
    turn["role"] = template_role(role)
    calls = turn.pop("tool_calls", None)
    if calls:
        turn["tool_calls"] = _calls(calls, role, place, name, tool_names)
    if "content" not in turn and not calls:
        raise InputError(f"{place} is {shown(message)}; valid: {VALID}", name)
    content = joined(turn.get("content"))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise InputError(f"{place}['content'] is {shown(content)}; valid: text", name)
    turn["content"] = check_text(f"{place}['content']", content)
    return _result(turn, place, name, tool_names) if role == "tool" else turn


def _checked_role(role: object, place: str, name: str, template: str) -> str:
    if not isinstance(role, str):
        raise InputError(f"{place}['role'] is {shown(role)}; valid: text", name)
    if role not in ROLES and role not in roles_of(template):
        valid = ", ".join(roles_of(template))
        raise InputError(f"{place}['role'] is {shown(role)}; valid: {valid}", name)
    return role


def _calls(
    values: object, role: str, place: str, name: str, tool_names: dict[str, str]
) -> list[TemplateCall]:
    """The calls of a message; their ids and names go to ``tool_names``."""
    several = list(values) if isinstance(values, list | tuple) else []
    calls = [call for call in map(_call, several) if call is not None]
    if role != "assistant" or len(calls) != len(several) or not 0 < len(calls) <= MOST_CALLS:
        valid = f"up to {MOST_CALLS} calls of an assistant's message, such as {CALL}"
        raise InputError(f"{place}.tool_calls is {shown(values)}; valid: {valid}", name)
    for call in calls:
        tool_names[call["id"]] = call["function"]["name"]
    return calls


def _call(value: object) -> TemplateCall | None:
    """A call as templates take it; None: it is none."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        return None
    name = function.get("name")
    key = value.get("id")
    arguments = function.get("arguments")
    if not is_name(name) or not is_name(key) or not isinstance(arguments, str | dict):
        return None
    form = CalledFunction(name=name, arguments=_arguments(arguments))
    return TemplateCall(id=key, type="function", function=form)


def is_name(value: object) -> TypeGuard[str]:
    """Whether a value may be the name of a tool, or the id of a call."""
    return isinstance(value, str) and 0 < len(value) <= MOST_LETTERS


def _arguments(arguments: str | dict[str, object]) -> str | dict[str, object]:
    """The object that arguments mean, or else their text."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments or "{}")
            return value if isinstance(value, dict) else arguments
    return arguments


def _result(
    turn: dict[str, object], place: str, name: str, tool_names: dict[str, str]
) -> dict[str, object]:
    """A result with the name of what was called."""
    key = turn.get("tool_call_id")
    tool = turn.get("name")
    if isinstance(key, str) and key in tool_names:
        return {**turn, "name": tool_names[key]}
    if not is_name(tool) or not isinstance(key, str | None):
        valid = "the id of a call in an earlier message, or else a name beside it"
        raise InputError(f"{place}.tool_call_id is {shown(key)}; valid: {valid}", name)
    return {**turn, "tool_call_id": key or tool, "content": f"{tool}: {turn['content']}"}
