"""Items of a response's input as messages, and what a client calls each message.

Every message keeps the name of the place that it was sent at, such as ``messages[0]`` or
``input[3]``, so that an error of the engine, which counts the messages that it gets, can name what
the client has sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenswift.chat.messages import client_text, plain_message
from tokenswift.checks import shown
from tokenswift.types import InputError

CALL = "function_call"
CALL_OUTPUT = "function_call_output"
MESSAGE_TYPES = (None, "message")
#: an item that stands for another one of this server's, which it names by its id
REFERENCE = "item_reference"
#: items that are left out in silence: what a model thought belongs to its turn alone
SILENT = "reasoning"


class PlacedMessage(NamedTuple):
    """A message, and what the client calls it.

    Attributes:
        place: such as ``messages[0]``, or "" for one that the client has not sent.
        message: as `LLM.chat` takes it.
    """

    place: str
    message: dict[str, object]


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
            text = client_text(item.get("output"), f"{place}.output")
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
