"""An answer that may call tools: its text and its calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenswift.chat.parser import Delta
from tokenswift.types import Generation


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: of the call; its result names it.
        name: of the tool.
        arguments: a JSON object, as text; cut where the answer was, by its length.
    """

    id: str
    name: str
    arguments: str

    @property
    def form(self) -> dict[str, Any]:
        """The call as messages hold it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer holds.

    Attributes:
        text: beside calls.
        calls: names and arguments.
        whole: whether the last call is.
        thought: before the text.
    """

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    whole: bool = True
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of ``LLM.chat``.

    Attributes:
        text: of the answer, beside calls.
        tool_calls: in the order in which they were written.
        generation: the tokens, as they were written, with their figures.
        reasoning: what the model thought before, between ``<think>`` and ``</think>``.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    generation: Generation = field(repr=False)
    reasoning: str = ""

    @property
    def finish_reason(self) -> str:
        """Why it ended: "tool_calls" where it calls and was not cut, else the generation's."""
        reason = self.generation.finish_reason
        return "tool_calls" if self.tool_calls and reason != "length" else reason

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, for the next call of ``LLM.chat``; a result follows
        it as ``{"role": "tool", "tool_call_id": call.id, "content": …}``."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.form for call in self.tool_calls]
        return made


def gathered(deltas: Iterable[Delta]) -> Said:
    """The pieces of an answer, put together."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    whole = True
    for delta in deltas:
        if delta.kind == "thought":
            thoughts.append(delta.text)
        elif delta.kind == "text":
            texts.append(delta.text)
        elif delta.kind == "call":
            calls.append((delta.text, []))
            whole = False
        elif delta.kind == "arguments":
            calls[-1][1].append(delta.text)
        else:
            whole = True
    made = tuple((name, "".join(pieces)) for name, pieces in calls)
    return Said("".join(texts), made, whole, "".join(thoughts))


def call_id(answer: str, index: int) -> str:
    """The id of a call: the same one each time the answer is read."""
    return "call_" + hashlib.sha256(f"{answer}\0{index}".encode()).hexdigest()[:24]
