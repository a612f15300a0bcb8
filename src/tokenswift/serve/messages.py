"""Messages of requests, in OpenAI's forms, as the library takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tokenswift.checks import shown
from tokenswift.types import InputError

CALL, RESULT, SKIPPED = "function_call", "function_call_output", "reasoning"
KINDS = (None, "message", CALL, RESULT, SKIPPED)


class Piece(BaseModel):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str | None:
        """Its text; None: it holds something else."""
        if self.type == "refusal":
            return self.refusal
        return self.text if self.type in ("text", "input_text", "output_text") else None


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"] | None = None
    content: str | list[Piece] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, of other servers
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as `chat` takes it.

        Args:
            where: its name, such as ``messages[0]``.
        Raises:
            InputError: it has no role, or holds something else than text, or nothing (what only an
                assistant may say).
        """
        if self.role is None:
            valid = "system, developer, user, assistant, tool"
            raise InputError(f"{where}.role is missing; valid: {valid}", where.partition("[")[0])
        nothing = (self.refusal or "") if self.role == "assistant" else None
        content = nothing if self.content is None else self.content
        text = plain_text(content, f"{where}.content", self.tool_calls)
        made: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            made["tool_calls"] = self.tool_calls
        if self.role == "assistant" and (thought := self.reasoning_content or self.reasoning):
            made["reasoning_content"] = thought
        if self.role == "tool":
            made["tool_call_id"] = self.tool_call_id
        return made


class Item(Message):
    """One item of a response's input: a message, a call, or what came of it."""

    type: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Piece] | None = None


def plain_text(content: str | list[Piece] | None, where: str, calls: Any = None) -> str:
    """The text of a content.

    Args:
        where: its name.
        calls: with them there may be none.
    Raises:
        InputError: it holds something else than text, or nothing.
    """
    if content is None and not calls:
        raise InputError(f"{where} is missing; valid: text", where.partition("[")[0])
    if not isinstance(content, list):
        return content or ""
    for piece in content:
        if piece.said is None:
            raise InputError(
                f"{where} holds a part of type {shown(piece.type)}; valid: text", where.partition("[")[0]
            )
    return "".join(piece.said or "" for piece in content)


def plain_messages(messages: Sequence[Message], name: str) -> list[dict[str, Any]]:
    """Messages as `chat` takes them.

    Raises:
        InputError: naming what is wrong.
    """
    return [message.plain(f"{name}[{i}]") for i, message in enumerate(messages)]


def plain_items(items: Sequence[Item], name: str = "input") -> list[dict[str, Any]]:
    """Items as messages: calls in a row, and a text of the assistant's before them, are one message.

    Raises:
        InputError: naming what is wrong.
    """
    made: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        if item.type not in KINDS:
            valid = f"message, {CALL}, {RESULT}"
            raise InputError(f"{where}.type is {shown(item.type)}; valid: {valid}", name)
        if item.type == CALL:
            function = {"name": item.name, "arguments": item.arguments}
            if not (made and made[-1]["role"] == "assistant"):
                made.append({"role": "assistant", "content": ""})
            call = {"id": item.call_id, "type": "function", "function": function}
            made[-1]["tool_calls"] = [*made[-1].get("tool_calls", ()), call]
        elif item.type == RESULT:
            text = plain_text(item.output, f"{where}.output")
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.type != SKIPPED:
            made.append(item.plain(where))
    return made
