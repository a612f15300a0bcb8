"""The tools of a chat, in either form of OpenAI's interface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

import msgspec

from tokenswift.checks import check_flag, shown
from tokenswift.grammar import Grammar
from tokenswift.json_schema import closed
from tokenswift.types import InputError

MOST_TOOLS = 128  # of a chat
CHOICES = ("none", "auto", "required")
FORM = "{'type': 'function', 'function': {'name': …, 'parameters': {…}}}"
NAMED = "{'type': 'function', 'function': {'name': …}} with the name of a tool"


class FunctionForm(TypedDict):
    """What is said of a function."""

    name: str
    description: str
    parameters: dict[str, object]


class ToolForm(TypedDict):
    """A tool as chat templates take it."""

    type: str
    function: FunctionForm


@dataclass(frozen=True, slots=True)
class Tools:
    """What a model may call in an answer.

    Attributes:
        known: by name, as chat templates take them.
        choice: "auto" (as the model likes), "required" (one at least), or the name of the one to be
            called.
        parallel: several calls in an answer.
    """

    known: Mapping[str, ToolForm]
    choice: str = "auto"
    parallel: bool = True

    @property
    def callable(self) -> list[str]:
        """Names of those that the choice admits."""
        return [self.choice] if self.choice in self.known else [*self.known]

    @property
    def forms(self) -> list[ToolForm]:
        """As chat templates take them."""
        return [*self.known.values()]

    @property
    def schemas(self) -> dict[str, dict[str, object]]:
        """The schemas of their arguments, by name."""
        return {name: tool["function"]["parameters"] for name, tool in self.known.items()}

    def bound(self, name: str) -> dict[str, object]:
        """The schema that arguments are held to, with no members that it does not list unless it
        says so, and without keywords that llguidance does not know."""
        parameters = json.loads(json.dumps(self.known[name]["function"]["parameters"]))
        return closed({"type": "object", **parameters, "x-guidance": {"lenient": True}})


def tools_of(tools: object, choice: object = None, parallel: object = None) -> Tools | None:
    """The tools of a chat.

    Args:
        tools: a list of tools in either form of OpenAI's interface: ``{"type": "function",
            "function": {…}}`` of chats, ``{"type": "function", "name": …}`` of responses; None or
            []: none.
        choice: "none", "auto", "required", or the name of a tool in either form; None: "auto".
        parallel: whether an answer may hold several calls; None: it may.
    Returns:
        None where nothing can be called.
    Raises:
        InputError: naming what is wrong and what is valid.
    """
    listed: Sequence[object] | None = [] if tools is None else None
    if isinstance(tools, list | tuple) and len(tools) <= MOST_TOOLS:
        listed = tools
    if listed is None:
        raise _wrong("tools", tools, f"a list of tools such as {FORM}, up to {MOST_TOOLS}")
    is_parallel = True if parallel is None else check_flag("parallel_tool_calls", parallel)
    forms = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed)]
    known = {form["function"]["name"]: form for form in forms}
    if len(known) < len(forms):
        raise _wrong("tools", [form["function"]["name"] for form in forms], "different names")
    chosen = _choice(choice, known)
    return Tools(known, chosen, is_parallel) if known and chosen != "none" else None


def _wrong(place: str, value: object, valid: str) -> InputError:
    return InputError(f"{place} is {shown(value)}; valid: {valid}", place.partition("[")[0])


def _function(value: object) -> Mapping[str, object] | None:
    """The fields of a function, in either form of the interface; None: there are none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return function if isinstance(function, Mapping) else None


class _Function(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None


def _tool(tool: object, place: str) -> ToolForm:
    """A tool as chat templates take it."""
    try:
        function = msgspec.convert(_function(tool), _Function)
        parameters = function.parameters or {"type": "object", "properties": {}}
        Grammar.json_schema(parameters)
        is_function = isinstance(tool, Mapping) and tool.get("type") == "function"
        is_object = parameters.get("type", "object") == "object"
        if not is_function or not is_object or function.name in CHOICES:
            raise ValueError("a function's name is its own, and its parameters are an object's")
    except (ValueError, InputError) as error:  # msgspec's, too
        raise InputError(
            f"{place} is {shown(tool)} ({error}); valid: a function, such as {FORM}", "tools"
        ) from error
    form = FunctionForm(
        name=function.name, description=function.description or "", parameters=parameters
    )
    return ToolForm(type="function", function=form)


def _choice(choice: object, known: Mapping[str, object]) -> str:
    valid = CHOICES if known else CHOICES[:2]
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in valid:
        return choice
    name = (_function(choice) or {}).get("name")
    if not isinstance(name, str) or name not in known:
        raise _wrong("tool_choice", choice, f"{', '.join(valid)}, or {NAMED}")
    return name
