"""Messages of a chat, checked and in one form, whatever form of OpenAI's interface they came in.

Everything in them is a stranger's. A role becomes a part of the prompt's own marks, so only those
that exist are taken; contents, names and arguments stay text (`apart.set_apart`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tokenswift.checks import check_text, shown
from tokenswift.loader.abilities import Turns
from tokenswift.types import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CALLS = 128  # of a message
MOST_LETTERS = 128  # of a call's id, and of its name
VALID = "a message such as {'role': 'user', 'content': 'Hello'}"
CALL = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{}'}}"
#: a comparison of a role in a template: with a text, or with a list of texts
COMPARED = re.compile(
    r"""role['"\])]*(?:\s*\|\s*lower)?\s*(?:==|!=|(?:not\s+)?in)\s*(['"]\w+['"]|[\[(][^\])]{0,200})"""
)
QUOTED = re.compile(r"""['"]([a-z][a-z_]{0,31})['"]""")


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
    called: dict[str, str] = {}
    return [
        _message(message, f"{name}[{i}]", name, template, called)
        for i, message in enumerate(messages)
    ]


def joined(content: object) -> object:
    """The text of a message's content: itself, or of parts such as ``{"type": "text", "text":
    "Hello"}``; anything else as it is."""
    if not isinstance(content, list | tuple) or not content:
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else 0
        if not isinstance(text, str):
            return content
        texts.append(text)
    return "".join(texts)


def roles_of(template: str) -> list[str]:
    """The roles that a message may have: those of OpenAI's interface, and those that a template
    compares a message's role with."""
    compared = (QUOTED.findall(words) for words in COMPARED.findall(template))
    return list(dict.fromkeys([*ROLES, *(role for roles in compared for role in roles)]))


def _message(
    message: object, where: str, name: str, template: str, called: dict[str, str]
) -> dict[str, Any]:
    """A checked message.

    Args:
        called: ids of earlier calls with the names of their tools; those of this message are
            added.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise InputError(f"{where} is {shown(message)}; valid: {VALID}", name)
    turn: dict[str, Any] = dict(message)
    _check_role(turn["role"], where, name, template)
    calls = turn.pop("tool_calls", None)
    if calls:
        turn["tool_calls"] = _calls(calls, turn["role"], where, name, called)
    if "content" not in turn and not calls:
        raise InputError(f"{where} is {shown(message)}; valid: {VALID}", name)
    content = joined(turn.get("content"))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise InputError(f"{where}['content'] is {shown(content)}; valid: text", name)
    turn["content"] = check_text(f"{where}['content']", content)
    return _result(turn, where, name, called) if turn["role"] == "tool" else turn


def _check_role(role: object, where: str, name: str, template: str) -> None:
    if not isinstance(role, str):
        raise InputError(f"{where}['role'] is {shown(role)}; valid: text", name)
    if role not in ROLES and role not in roles_of(template):
        valid = ", ".join(roles_of(template))
        raise InputError(f"{where}['role'] is {shown(role)}; valid: {valid}", name)


def _calls(calls: object, role: str, where: str, name: str, called: dict[str, str]) -> Turns:
    """The calls of a message; their ids and names go to ``called``."""
    listed = list(calls) if isinstance(calls, list | tuple) else []
    turns = [call for value in listed if (call := _call(value)) is not None]
    if role != "assistant" or len(turns) != len(listed) or not 0 < len(turns) <= MOST_CALLS:
        valid = f"up to {MOST_CALLS} calls of an assistant's message, such as {CALL}"
        raise InputError(f"{where}.tool_calls is {shown(calls)}; valid: {valid}", name)
    for call in turns:
        called[call["id"]] = call["function"]["name"]
    return turns


def _call(value: object) -> dict[str, Any] | None:
    """A call as templates take it; None: it is none."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        return None
    name, key, arguments = function.get("name"), value.get("id"), function.get("arguments")
    if not (_is_name(name) and _is_name(key) and isinstance(arguments, str | dict)):
        return None
    form = {"name": name, "arguments": _object(arguments)}
    return {"id": key, "type": "function", "function": form}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_LETTERS


def _object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """The object that arguments mean, or else their text."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments or "{}")
            return value if isinstance(value, dict) else arguments
    return arguments


def _result(turn: dict[str, Any], where: str, name: str, called: dict[str, str]) -> dict[str, Any]:
    """A result with the name of what was called."""
    key, tool = turn.get("tool_call_id"), turn.get("name")
    if isinstance(key, str) and key in called:
        return {**turn, "name": called[key]}
    if not _is_name(tool) or not isinstance(key, str | None):
        valid = "the id of a call in an earlier message, or else a name beside it"
        raise InputError(f"{where}.tool_call_id is {shown(key)}; valid: {valid}", name)
    return {**turn, "tool_call_id": key or tool, "content": f"{tool}: {turn['content']}"}
