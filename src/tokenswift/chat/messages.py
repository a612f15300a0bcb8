"""Messages with calls and what came of them, checked, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenswift.chat.family import Family
from tokenswift.chat.tools import MOST, NAME
from tokenswift.checks import check_text, shown
from tokenswift.loader.prompts import joined
from tokenswift.types import InputError

CALL = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{}'}}"
IDENTIFIER = 128  # characters of a call's id


def for_template(messages: Sequence[Any], family: Family, name: str = "messages") -> list[dict[str, Any]]:
    """Messages of OpenAI's form as templates take them: arguments of calls as objects; a call's message
    without text has the text ""; results have the name of what was called. A call whose arguments are no
    whole object, such as one of ours that was cut by the length, is text, as it was written.

    Args:
        family: how the model writes calls.
        name: of the argument.
    Raises:
        InputError: a call, or a result, that is none.
    """
    made: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        if not isinstance(message, Mapping):
            valid = "a message such as {'role': 'user', 'content': 'Hello'}"
            raise InputError(f"{where} is {shown(message)}; valid: {valid}", name)
        one = (
            {**message, "content": joined(message.get("content"))} if "content" in message else dict(message)
        )
        if calls := one.get("tool_calls"):
            if not isinstance(calls, list | tuple) or len(calls) > MOST or one.get("role") != "assistant":
                valid = f"a list of up to {MOST} calls, of an assistant's message"
                raise InputError(f"{where}.tool_calls is {shown(calls)}; valid: {valid}", name)
            made_calls = [_call(call, f"{where}.tool_calls[{j}]", name) for j, call in enumerate(calls)]
            called |= {call["id"]: call["function"]["name"] for call in made_calls}
            one["tool_calls"] = [c for c in made_calls if isinstance(c["function"]["arguments"], Mapping)]
            cut = [family.begun(**c["function"]) for c in made_calls if c not in one["tool_calls"]]
            one["content"] = "\n".join(filter(None, [one.get("content"), *cut]))
        if not one.get("tool_calls"):
            one.pop("tool_calls", None)
        if one.get("role") == "tool":
            answered = one.get("tool_call_id")
            if not isinstance(answered, str) or answered not in called:
                valid = "the id of a call in an earlier message"
                raise InputError(f"{where}.tool_call_id is {shown(answered)}; valid: {valid}", name)
            one["name"] = called[answered]
        made.append(one)
    return made


def _call(call: Any, where: str, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InputError(f"{where} is {shown(call)}; valid: a call such as {CALL}", name)
    known, made = function.get("name"), call.get("id")
    if not isinstance(known, str) or not NAME.fullmatch(known):
        raise InputError(f"{where}.function.name is {shown(known)}; valid: the name of a tool", name)
    if not isinstance(made, str) or not 1 <= len(made) <= IDENTIFIER:
        raise InputError(f"{where}.id is {shown(made)}; valid: text of up to {IDENTIFIER} characters", name)
    arguments = _object(function.get("arguments"), f"{where}.function.arguments", name)
    return {"id": made, "type": "function", "function": {"name": known, "arguments": arguments}}


def _object(arguments: Any, where: str, name: str) -> dict[str, Any] | str:
    """The object that is meant by arguments, which are JSON, or that object; text that is none as it is."""
    if isinstance(arguments, str):
        text = check_text(where, arguments)
        try:
            found = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return text
        return found if isinstance(found, dict) else text
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where} is {shown(arguments)}; valid: a JSON object, as text", name)
    return dict(arguments)
