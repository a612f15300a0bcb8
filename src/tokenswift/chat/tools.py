"""The tools of a chat, and how families of models write calls of them.

Tools come in the two forms of OpenAI's interface: ``{"type": "function", "function": {…}}`` of chats, and
``{"type": "function", "name": …}`` of responses. Everything in them is a stranger's: a name becomes part of a
grammar and of a prompt, a schema is compiled.

All families write a call as ``{"name": NAME, KEY: {arguments}}``; they differ in the key, in what stands
around it, and in whether text may come before. An answer that is such JSON and nothing else, perhaps fenced
as code, is calls in every family: coder models write so. Which family a model belongs to is seen from its
chat template and its vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.checks import check_flag, shown
from tokenswift.grammar import CLOSE, OPEN, Grammar, closed
from tokenswift.loader import prompts as loader
from tokenswift.types import InputError

MOST = 128  # tools of a chat
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")
FORM = "{'type': 'function', 'function': {'name': …, 'parameters': {…}}}"
NAMED = "{'type': 'function', 'function': {'name': …}} with the name of a tool"
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
        copied = json.loads(json.dumps(self.parameters))
        return closed({"type": "object", **copied, "x-guidance": {"lenient": True}})


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
        return tuple(tool for tool in self.known if tool.name == self.choice) or self.known

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
    if not isinstance(tools, list | tuple | None) or len(tools or ()) > MOST:
        raise _wrong("tools", tools, f"a list of tools such as {FORM}, up to {MOST}")
    several = True if parallel is None else check_flag("parallel_tool_calls", parallel)
    known = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    names = [tool.name for tool in known]
    if len(set(names)) < len(names):
        raise InputError(f"tools are named {shown(names)}; valid: different names", "tools")
    chosen = _choice(choice, names)
    return Tools(known, chosen, several) if known and chosen != "none" else None


def _wrong(where: str, value: Any, valid: str) -> InputError:
    return InputError(f"{where} is {shown(value)}; valid: {valid}", where.partition("[")[0])


def _tool(tool: Any, where: str) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise _wrong(where, tool, f"a function, such as {FORM}")
    where += ".function" if function is not tool else ""
    name, described, parameters = map(function.get, ("name", "description", "parameters"))
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in CHOICES:
        valid = "up to 64 letters, digits, _ and -, and none of " + ", ".join(CHOICES)
        raise _wrong(f"{where}.name", name, valid)
    if not isinstance(described, str | None):
        raise _wrong(f"{where}.description", described, "text")
    parameters = NOTHING if parameters is None else parameters
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.parameters", parameters, "a JSON schema of an object")
    try:
        Grammar.json_schema(parameters)
    except InputError as error:
        raise InputError(f"{where}.parameters: {error}", "tools") from error
    return Tool(name, parameters or NOTHING, described or "")


def _choice(choice: Any, names: Sequence[str]) -> str:
    valid = CHOICES if names else CHOICES[:2]
    if choice is None or (isinstance(choice, str) and choice in valid):
        return choice or "auto"
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None or name not in names:
        raise _wrong("tool_choice", choice, f"{', '.join(valid)}, or {NAMED}")
    return name


# ---- families -------------------------------------------------------------------------------------

#: separators as templates write JSON, and no other whitespace: small models write it for ever
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: where a model writes calls of its own accord, it may indent them, but not for ever
INDENTED = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\r\n]{0,99}"}
_S = r"[ \t\r\n]*"
TAIL = 16  # tokens at a prompt's end, among which the mark of a thought is


@dataclass(frozen=True, slots=True)
class Family:
    """A family's form of calls.

    Attributes:
        name: of the family.
        key: of the arguments.
        opening: what a call begins with, anywhere in an answer; "": calls begin an answer.
        closing: what ends it.
        between: what stands between two calls.
        begins: a token that may stand before the first call of an answer, or "".
    """

    name: str
    key: str = "arguments"
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    begins: str = ""

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, names with arguments, as an answer has them."""
        return self.between.join(
            f"{self.opening}{self._head(name)}{json.dumps(arguments, ensure_ascii=False)}}}{self.closing}"
            for name, arguments in calls
        )

    def grammar(self, tools: Tools, special: Sequence[str] = (), schema: str | None = None) -> str:
        """The grammar of an answer, in llguidance's form of Lark.

        A forced answer is calls from the first token on; else an answer is free until a call begins, and is
        held to the calls from there.

        Args:
            special: the vocabulary's special tokens: a grammar names them, and text does not hold them.
            schema: JSON schema of an answer that calls nothing; None: any text.
        """
        names = [f"call_{i}" for i in range(len(tools.callable))]
        tag, rest = self.opening.strip(), self.opening[len(self.opening.rstrip()) :]
        begin = _spelt(self.opening, special)
        more = f"({_quoted(self.between)} {begin} call)*" if tools.parallel else ""
        token = f"{self.begins}?" if self.begins in special else ""
        lines = ["%llguidance {}"]
        if tools.forced:
            lines.append(f"start: {begin} call {more}")
        elif schema is not None:
            lines.append(f"start: answer | {token} {begin} call {more}")
            lines.append(f"answer: {_json(closed(json.loads(schema)))}")
        else:
            opened = f" | opened {_quoted(rest)} call {more}" if tag else ""
            lines += [f"start: TEXT | {token} bare{opened}", *self._free(tools, special)]
            if tag:
                lines.append(f"opened: trigger{f' | TEXT? {tag}' if tag in special else ''}")
                lines.append(f"trigger[lazy]: TEXT {_quoted(tag)}")
        if tag or tools.forced or schema is not None:
            lines.append(f"call: ({' | '.join(names)}) {_spelt('}' + self.closing, special)}")
            for name, tool in zip(names, tools.callable, strict=True):
                head = _quoted(self._head(tool.name))
                if schema is not None:  # a word each, as schemas have them: a longer one would hide these
                    words = ("{", '"name"', ": ", json.dumps(tool.name), ", ", json.dumps(self.key), ": ")
                    head = " ".join(map(_quoted, words))
                lines.append(f"{name}: {head} {_json(tool.bound)}")
        return "\n".join(lines) + "\n"

    def _free(self, tools: Tools, special: Sequence[str]) -> list[str]:
        """Rules of an answer that is calls without marks, perhaps indented or fenced as code, and of text,
        which is what does not begin as one up to its arguments."""
        begins = f"({re.escape(self.begins)})?" if self.begins not in special else ""
        before, behind = f"{begins}{_S}(```(json)?{_S})?", f',{_S}"{self.key}"{_S}:{_S}'
        call, known = rf'\{{{_S}"name"{_S}:{_S}', [tool.name for tool in tools.callable]
        first = " | ".join(f"FIRST_{i} bare_{i}" for i in range(len(known)))
        others = " | ".join(f"{_quoted(json.dumps(name))} KEY bare_{i}" for i, name in enumerate(known))
        lines = [
            f"bare: ({first}) CLOSE {'(MORE other CLOSE)*' if tools.parallel else ''} FENCE?",
            rf'TEXT: /(.|\n)*/ & ~/{before}{call}"({"|".join(known)})"{_S}{behind}\{{(.|\n)*/',
            rf"CLOSE: /{_S}\}}/",
            f"FENCE: /{_S}```/",
        ]
        if tools.parallel:
            lines += [f"MORE: /{_S}(;{_S})?{call}/", f"KEY: /{_S}{behind}/", f"other: {others}"]
        for i, tool in enumerate(tools.callable):
            lines.append(f'FIRST_{i}: /{before}{call}"{tool.name}"{_S}{behind}/')
            lines.append(f"bare_{i}: {_json(tool.bound, INDENTED)}")
        return lines

    def _head(self, name: str) -> str:
        """What stands before the arguments of a call."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '


def _json(schema: dict[str, Any], spacing: dict[str, Any] = SPACING) -> str:
    given = {**schema.get("x-guidance", {}), **spacing}
    return "%json " + json.dumps({**schema, "x-guidance": given}, ensure_ascii=False)


def _spelt(text: str, special: Sequence[str]) -> str:
    """A text that has to come, the special tokens in it as such."""
    parts = re.split(r"(<[^<>]*>)", text)
    return " ".join(part if part in special else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


#: Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, after text or not
HERMES = Family("hermes", opening="<tool_call>\n", closing="\n</tool_call>")
#: an answer that is ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``
LLAMA3 = Family("llama3", key="parameters", between="; ", begins="<|python_tag|>")
#: models of which nothing is known: an answer that is ``{"name": …, "arguments": {…}}``, a call a line
PLAIN = Family("plain")


def template_of(tokenizer: Any) -> str:
    """The template that a tokenizer has for chats with tools; "" where it has none."""
    found = loader.template_of(tokenizer, tools=True)
    return found if isinstance(found, str) else ""


def family_of(tokenizer: Any) -> Family:
    """The family whose form of calls a model's template speaks of; a plain one where it speaks of none."""
    template = template_of(tokenizer)
    if "tools" in template and HERMES.opening.strip() in template:
        return HERMES
    if "tools" in template and ("ipython" in template or LLAMA3.begins in template):
        return LLAMA3
    return PLAIN


def thought_of(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Where the thought of an answer begins: "may" (the answer may begin with one), "begun" (the prompt has),
    "" (there is none).

    Args:
        prompt: ids of a chat.
    """
    if CLOSE not in template_of(tokenizer):
        return ""
    end = tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip()
    return "begun" if end.endswith(OPEN) else "" if end.endswith(CLOSE) else "may"
