"""What a chat template can write, seen from what it makes of small conversations.

Templates refuse, or leave out without a word, what they were not written for. So each ability is
tried: texts that no template writes of itself (marks) stand in a tool, a call or a result, and the
template has the ability where all of them come out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from tokenswift.types import InputError

#: messages as chat templates take them
Turns: TypeAlias = list[dict[str, Any]]
#: the text that a template makes of messages and variables; raises `InputError`
Render: TypeAlias = Callable[[Turns, Mapping[str, object]], str]

#: names of the variable in which templates look for tools
TOOL_VARIABLES = ("tools", "xml_tools")
SHORT = 9  # letters and digits of an id where a template wants that many
QUESTION = "3141592600001"
ANSWER = "3141592600002"
TOOL = "mark3141592600003"
PARAMETER = "mark3141592600004"
CALLED_NAMES = ("mark3141592600005", "mark3141592600006")
ARGUMENTS = ("3141592600007", "3141592600008")
RESULTS = ("3141592600009", "3141592600010")
IDS = ("call_3141592600011", "call_3141592600012")
NO_ROLE = "qzx"  # no template knows it


class LimitReached(InputError):
    """A template took too long, or too much memory: other messages are not tried."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template takes calls.

    Attributes:
        text_arguments: as JSON text instead of objects.
        no_content: beside a content that is None, instead of "".
        short_ids: with ids of nine letters and digits.
    """

    text_arguments: bool = False
    no_content: bool = False
    short_ids: bool = False

    def applied(self, turns: Turns) -> Turns:
        """Messages with calls in this style."""
        return [self._of(turn) for turn in turns]

    def _of(self, turn: Mapping[str, object]) -> dict[str, object]:
        styled = dict(turn)
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            styled["tool_calls"] = [self._call(call) for call in calls]
            if self.no_content and not turn["content"]:
                styled["content"] = None
        if self.short_ids and "tool_call_id" in turn:
            styled["tool_call_id"] = short_id(str(turn["tool_call_id"]))
        return styled

    def _call(self, call: Mapping[str, object]) -> dict[str, object]:
        styled = dict(call)
        function = call["function"]
        if self.short_ids:
            styled["id"] = short_id(str(call["id"]))
        if self.text_arguments and isinstance(function, Mapping):
            arguments = function["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            styled["function"] = {**function, "arguments": arguments}
        return styled


def short_id(key: str) -> str:
    """An id of nine letters and digits, the same for the same id; one of that form stays."""
    if re.fullmatch("[A-Za-z0-9]{9}", key):
        return key
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return base64.b32encode(digest).decode()[:SHORT].lower()


def in_parts(turns: Turns) -> Turns:
    """Messages whose contents are lists of parts."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn["content"], str)
        else turn
        for turn in turns
    ]


def probe_tool(name: str = TOOL, parameter: str = PARAMETER) -> dict[str, object]:
    """A tool in which two marks stand."""
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}}
    function = {"name": name, "description": "", "parameters": parameters}
    return {"type": "function", "function": function}


def tools_as_text(tools: Sequence[Mapping[str, object]]) -> str:
    """Tools as a template writes them that takes them for text: a list of functions."""
    return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


def probe_call(index: int) -> dict[str, object]:
    """A call in which two marks stand."""
    function = {"name": CALLED_NAMES[index], "arguments": {"text": ARGUMENTS[index]}}
    return {"id": IDS[index], "type": "function", "function": function}


def probe_result(index: int, role: str = "tool") -> dict[str, object]:
    """The result of `probe_call`."""
    named = {"tool_call_id": IDS[index], "name": CALLED_NAMES[index]}
    return {"role": role, "content": RESULTS[index], **named}


class Abilities:
    """The abilities of one template; each is tried when it is first asked for.

    Args:
        render: renders the template.
    """

    def __init__(self, render: Render) -> None:
        self._bare = render

    def render(self, turns: Turns, variables: Mapping[str, object]) -> str:
        """The text of messages, their contents in the form that the template reads.

        Raises:
            InputError: the template refuses them.
        """
        return self._bare(in_parts(turns) if self.reads_parts else turns, variables)

    @cached_property
    def reads_parts(self) -> bool:
        """Whether contents are lists of parts, as the template passes over text."""
        question = [_user(QUESTION)]
        if self._comes_out(self._bare, question, [QUESTION]):
            return False
        return self._comes_out(self._bare, in_parts(question), [QUESTION])

    @cached_property
    def tool_variable(self) -> str | None:
        """The variable in which tools are given to the template; None: it writes no tools."""
        marks = [QUESTION, TOOL, PARAMETER]
        for name in TOOL_VARIABLES:
            if self._comes_out(self.render, [_user(QUESTION)], marks, {name: [probe_tool()]}):
                return name
        return None

    @cached_property
    def system_tools(self) -> bool:
        """Whether a system message has a place of its own for tools, as text (Phi-4-mini)."""
        system = {"role": "system", "content": ANSWER, "tools": tools_as_text([probe_tool()])}
        marks = [ANSWER, QUESTION, TOOL, PARAMETER]
        return self._comes_out(self.render, [system, _user(QUESTION)], marks)

    @cached_property
    def calls(self) -> CallStyle | None:
        """How the template takes a call and its result; None: it does not write both."""
        turns = [_user(QUESTION), _assistant(probe_call(0)), probe_result(0)]
        marks = [QUESTION, CALLED_NAMES[0], ARGUMENTS[0], RESULTS[0]]
        for short, text, none in product((False, True), repeat=3):
            style = CallStyle(text_arguments=text, no_content=none, short_ids=short)
            if self._comes_out(self.render, style.applied(turns), marks):
                return style
        return None

    @cached_property
    def parallel(self) -> bool:
        """Whether a message may hold several calls."""
        if self.calls is None:
            return False
        calling = _assistant(probe_call(0), probe_call(1))
        turns = [_user(QUESTION), calling, probe_result(0), probe_result(1)]
        marks = [QUESTION, *CALLED_NAMES, *ARGUMENTS, *RESULTS]
        return self._comes_out(self.render, self.calls.applied(turns), marks)

    @cached_property
    def result_role(self) -> bool:
        """Whether the template knows the role of results, whatever it makes of calls."""
        before = [_user(QUESTION), {"role": "assistant", "content": ANSWER}]
        known = self._text([*before, probe_result(0)])
        if known is None or RESULTS[0] not in known:
            return False
        unknown = self._text([*before, probe_result(0, NO_ROLE)])
        return unknown is None or unknown.replace(NO_ROLE, "tool") != known

    def _text(self, turns: Turns) -> str | None:
        return text_or_none(self.render, turns, {})

    @staticmethod
    def _comes_out(
        render: Render,
        turns: Turns,
        marks: Sequence[str],
        variables: Mapping[str, object] | None = None,
    ) -> bool:
        text = text_or_none(render, turns, variables or {})
        return text is not None and all(mark in text for mark in marks)


def text_or_none(render: Render, turns: Turns, variables: Mapping[str, object]) -> str | None:
    """The text of messages; None: the template refuses them.

    Raises:
        LimitReached: it does not come to an end.
    """
    try:
        return render(turns, variables)
    except LimitReached:
        raise
    except InputError:
        return None


def _user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def _assistant(*calls: dict[str, object]) -> dict[str, object]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}
