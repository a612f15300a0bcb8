"""Messages and items of OpenAI's interface, as `LLM.chat` takes them.

Every message keeps the name of the place that it was sent at, such as ``messages[0]`` or
``input[3]``, so that an error of the engine, which counts the messages that it gets, can name what
the client has sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenswift.checks import shown
from tokenswift.types import InputError

#: types of a message's parts → the key of their text
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
CALL = "function_call"
CALL_OUTPUT = "function_call_output"
MESSAGE_TYPES = (None, "message")
#: an item that stands for another one of this server's, which it names by its id
REFERENCE = "item_reference"
#: items that are left out in silence: what a model thought belongs to its turn alone
SILENT = "reasoning"
MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")


class PlacedMessage(NamedTuple):
    """A message, and what the client calls it.

    Attributes:
        place: such as ``messages[0]``, or "" for one that the client has not sent.
        message: as `LLM.chat` takes it.
    """

    place: str
    message: dict[str, object]


def field_of(place: str) -> str:
    """The field of a body that a place lies in: ``messages`` of ``messages[0].content``."""
    return re.split(r"[.\[]", place, maxsplit=1)[0]


def plain_message(message: Mapping[str, object], place: str) -> dict[str, object]:
    """A message of OpenAI's interface as `LLM.chat` takes it.

    Args:
        place: its name, such as ``messages[0]``.
    Raises:
        InputError: it has no role, or holds something else than text, or nothing at all.
    """
    plain = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    role = message.get("role")
    if not isinstance(role, str):
        given = "missing" if role is None else shown(role)
        valid = "system, developer, user, assistant, tool"
        raise InputError(f"{place}.role is {given}; valid: {valid}", field_of(place))
    plain["role"] = "system" if role == "developer" else role
    content = plain_text(message.get("content"), f"{place}.content")
    if role == "assistant":
        content = content or message.get("refusal") or ""
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought:
            plain["reasoning_content"] = thought
    if not isinstance(content, str):
        given = "missing" if content is None else shown(content)
        raise InputError(f"{place}.content is {given}; valid: text", field_of(place))
    plain["content"] = content
    if role == "tool" and message.get("name") is not None:
        plain["name"] = message["name"]  # where its call is not in the conversation
    return plain


def plain_text(content: object, place: str) -> object:
    """The text of a content, or of its parts; anything else as it is.

    Raises:
        InputError: a part is no text.
    """
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(PARTS.get(kind)) if isinstance(kind, str) else None
        if not isinstance(text, str):
            given = shown(part if kind is None else kind)
            raise InputError(f"{place} holds a part of type {given}; valid: text", field_of(place))
        texts.append(text)
    return "".join(texts)


def plain_items(items: Sequence[Mapping[str, object]]) -> list[PlacedMessage]:
    """Items of a response's input as messages: calls in a row, and a text of the assistant's before
    them, are one message. Items of types that only other servers have are left out.

    Raises:
        InputError: naming what is wrong; nothing is left.
    """
    turns: list[PlacedMessage] = []
    for i, item in enumerate(items):
        place = f"input[{i}]"
        kind = item.get("type")
        if kind == CALL:
            _add_call(turns, item, place)
        elif kind == CALL_OUTPUT:
            text = plain_text(item.get("output"), f"{place}.output")
            if not isinstance(text, str):
                given = "missing" if text is None else shown(text)
                raise InputError(f"{place}.output is {given}; valid: text", "input")
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
            turns.append(PlacedMessage(place, result))
        elif kind == REFERENCE:
            valid = "previous_response_id, or the item itself"
            raise InputError(f"{place}.type is {REFERENCE!r}; valid: {valid}", "input")
        elif kind in MESSAGE_TYPES:
            turns.append(PlacedMessage(place, plain_message(item, place)))
        elif not isinstance(kind, str):
            valid = f"message, {CALL}, {CALL_OUTPUT}"
            raise InputError(f"{place}.type is {shown(kind)}; valid: {valid}", "input")
    if not turns:
        raise InputError("input holds no message; valid: text, or at least one message", "input")
    return turns


def _add_call(turns: list[PlacedMessage], item: Mapping[str, object], place: str) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if not turns or turns[-1].message.get("role") != "assistant":
        turns.append(PlacedMessage(place, {"role": "assistant", "content": ""}))
    calls = turns[-1].message.get("tool_calls")
    turns[-1].message["tool_calls"] = [*calls, call] if isinstance(calls, list) else [call]


def foreign_items(items: Sequence[Mapping[str, object]]) -> list[str]:
    """What is left out of a response's input, for the log: ``input[2] (web_search_call)``."""
    known = (*MESSAGE_TYPES, CALL, CALL_OUTPUT, REFERENCE, SILENT)
    return [
        f"input[{i}] ({item.get('type')})"
        for i, item in enumerate(items)
        if item.get("type") not in known
    ]


def renamed(text: str, field: str, places: Sequence[str]) -> str:
    """An error's line with the names of messages that the client knows.

    Args:
        text: a line that may begin with ``FIELD[N]``, N counting all messages.
        field: the body's field that holds the prompt.
        places: what the client calls each message; "" for those of earlier responses.
    """
    begins = re.match(rf"{re.escape(field)}\[(\d+)\]", text)
    if begins is None or int(begins[1]) >= len(places):
        return text
    place = places[int(begins[1])] or "the conversation before"
    return place + re.sub(r"^\['(\w+)'\]", r".\1", text[begins.end() :])
