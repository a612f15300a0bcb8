"""The tools of a chat and the choice among them: read once, bounded, checked.

Tools come in the two forms of OpenAI's interface: ``{"type": "function", "function": {…}}`` of chats, and
``{"type": "function", "name": …}`` of responses. Everything in them is a stranger's: a name becomes part of a
grammar and of a prompt, a schema is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.checks import check_flag, check_text, depth_and_size, shown
from tokenswift.grammar import closed
from tokenswift.types import InputError

MOST = 128  # tools of a chat
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DESCRIBED = 8192  # characters of a description
SCHEMA = 65_536  # characters of a tool's schema, and
DEPTH = 32  # its levels
CHOICES = ("none", "auto", "required")
FORM = "{'type': 'function', 'function': {'name': …, 'parameters': {…}}}"
#: of a function without parameters
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: letters, digits, ``_`` and ``-``, 64 at most.
        parameters: JSON schema of its arguments, an object's.
        description: what it does, "" where nothing is said.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str = ""

    @property
    def form(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def bound(self) -> dict[str, Any]:
        """The schema that arguments are held to, with no members that it does not list unless it says so, and
        without keywords that llguidance does not know."""
        return closed(
            {"type": "object", **json.loads(json.dumps(self.parameters)), "x-guidance": {"lenient": True}}
        )


@dataclass(frozen=True, slots=True)
class Tools:
    """What a model may call in an answer.

    Attributes:
        known: all of them.
        choice: "auto" (as the model likes), "required" (one at least), or the name of the one to be called.
        parallel: several calls in an answer.
    """

    known: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that the choice admits."""
        named = tuple(tool for tool in self.known if tool.name == self.choice and self.is_named)
        return named or self.known

    @property
    def is_named(self) -> bool:
        """Whether one of them is to be called, and which one."""
        return self.choice not in CHOICES

    @property
    def forced(self) -> bool:
        """Whether there is a call from the first token on."""
        return self.choice != "auto"

    @property
    def forms(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [tool.form for tool in self.known]


def tools_of(tools: Any, choice: Any = None, parallel: Any = None) -> Tools | None:
    """The tools of a chat.

    Args:
        tools: a list of tools in either form; None or []: none.
        choice: "none", "auto", "required", or ``{"type": "function", "function": {"name": …}}`` (of responses
            ``{"type": "function", "name": …}``); None: "auto".
        parallel: whether an answer may hold several calls; None: it may.
    Returns:
        None where nothing can be called.
    Raises:
        InputError: naming what is wrong and what is valid.
    """
    if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str)):
        raise _wrong("tools", tools, f"a list of tools such as {FORM}")
    several = True if parallel is None else check_flag("parallel_tool_calls", parallel)
    if not tools:
        if choice not in (None, "none", "auto"):
            text = f"tool_choice is {shown(choice)} without tools; valid: none, auto"
            raise InputError(text, "tool_choice")
        return None
    if len(tools) > MOST:
        raise InputError(f"tools has {len(tools):,} entries; valid: up to {MOST}", "tools")
    known = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in known]
    for i, name in enumerate(names):
        if name in names[:i]:
            text = f"tools[{i}] is named {name!r} like another one; valid: different names"
            raise InputError(text, "tools")
    chosen = _choice(choice, names)
    return None if chosen == "none" else Tools(known, chosen, several)


def _wrong(where: str, value: Any, valid: str) -> InputError:
    return InputError(f"{where} is {shown(value)}; valid: {valid}", where.partition("[")[0])


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise _wrong(where, tool, f"a function, such as {FORM}")
    function = tool.get("function", tool)
    where += ".function" if function is not tool else ""
    if not isinstance(function, Mapping):
        raise _wrong(where, function, "an object with name and parameters")
    name, described = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in CHOICES:
        valid = "up to 64 letters, digits, _ and -, and none of " + ", ".join(CHOICES)
        raise _wrong(f"{where}.name", name, valid)
    if described is not None and (not isinstance(described, str) or len(described) > DESCRIBED):
        raise _wrong(f"{where}.description", described, f"text of up to {DESCRIBED:,} characters")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.parameters")
    return Tool(name, parameters or NOTHING, check_text(f"{where}.description", described or ""))


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise _wrong(where, schema, "a JSON schema of an object")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        depth, _ = depth_and_size(json.loads(text), DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        said = f"{where} is not JSON ({error}); valid: a JSON schema of an object"
        raise InputError(said, "tools") from error
    if (size := len(check_text(where, text))) > SCHEMA:
        raise InputError(f"{where} is {size:,} characters of JSON; valid: up to {SCHEMA:,}", "tools")
    if depth > DEPTH:
        raise InputError(f"{where} has more than {DEPTH} levels; valid: fewer", "tools")


def _choice(choice: Any, names: Sequence[str]) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    name = None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
    if name is None or name not in names:
        named = "{'type': 'function', 'function': {'name': …}} with the name of a tool"
        raise _wrong("tool_choice", choice, f"{', '.join(CHOICES)}, or {named}")
    return name
