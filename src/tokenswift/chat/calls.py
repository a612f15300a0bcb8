"""Between a chat and a model: what its template is given, what an answer may hold, and what it held.

A conversation is checked and put into the template's form; an answer is bound by a grammar to calls that are
valid, and read into a thought, text and calls.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tokenswift.chat.parser import Delta, Parser
from tokenswift.chat.tools import MOST, PLAIN, Family, Tool, Tools, family_of, template_of
from tokenswift.checks import shown
from tokenswift.loader.prompts import joined
from tokenswift.sampling.masks import faults, special_tokens
from tokenswift.types import Generation, InputError

logger = logging.getLogger("tokenswift")
CALL = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{}'}}"
IDENTIFIER = 128  # characters of a call's id or name
#: where a chat template knows no tools
TOLD = """You can call functions. As JSON, they are:
{tools}
To call one, answer with nothing but {{"name": NAME, "arguments": {{…}}}}{more}."""


# ---- what a template is given ---------------------------------------------------------------------


def conversation(
    messages: Sequence[Any], tools: Tools | None, tokenizer: Any, name: str = "messages"
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]] | None]:
    """Messages, and the tools beside them, as a model's template takes them.

    Arguments of calls become objects, but for those that are none, such as one of ours that was cut by the
    length, and results get the name of what was called. Where the template knows no tools, the text of the
    conversation says it all.

    Args:
        messages: in the form of OpenAI's interface.
        name: of the argument.
    Raises:
        InputError: a message, a call or a result that is none.
    """
    called = dict[str, str]()
    made = [_message(one, f"{name}[{i}]", name, called) for i, one in enumerate(messages)]
    if "tools" in template_of(tokenizer):
        return made, None if tools is None else [*tools.forms]
    return _in_words(made, tools), None


def _message(message: Any, where: str, name: str, called: dict[str, str]) -> dict[str, Any]:
    """A message for the template; ``called``: ids of calls with names, to which its own are added."""
    if not isinstance(message, Mapping):
        valid = "a message such as {'role': 'user', 'content': 'Hello'}"
        raise InputError(f"{where} is {shown(message)}; valid: {valid}", name)
    made = {**message, **({"content": joined(message["content"])} if "content" in message else {})}
    calls = made.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple) or len(calls) > MOST or made.get("role") != "assistant":
            valid = f"a list of up to {MOST} calls, of an assistant's message"
            raise InputError(f"{where}.tool_calls is {shown(calls)}; valid: {valid}", name)
        known = [_call(call, f"{where}.tool_calls[{j}]", name) for j, call in enumerate(calls)]
        called |= {call["id"]: call["function"]["name"] for call in known}
        made |= {"content": made.get("content") or "", "tool_calls": known}
    if made.get("role") == "tool":
        answered = made.get("tool_call_id")
        if not isinstance(answered, str) or answered not in called:
            valid = "the id of a call in an earlier message"
            raise InputError(f"{where}.tool_call_id is {shown(answered)}; valid: {valid}", name)
        made["name"] = called[answered]
    return made


def _call(call: Any, where: str, name: str) -> dict[str, Any]:
    """A call, its arguments as the object that they mean, or as text where they mean none."""
    given = call if isinstance(call, Mapping) else {}
    function = given.get("function")
    function = function if isinstance(function, Mapping) else {}
    texts, arguments = (given.get("id"), function.get("name")), function.get("arguments")
    fits = all(isinstance(text, str) and 0 < len(text) <= IDENTIFIER for text in texts)
    if not fits or not isinstance(arguments, str | Mapping):
        raise InputError(f"{where} is {shown(call)}; valid: a call such as {CALL}", name)
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(arguments or "{}")
            arguments = found if isinstance(found, dict) else arguments
    return {"id": texts[0], "type": "function", "function": {"name": texts[1], "arguments": arguments}}


def _in_words(messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """A conversation without calls and tools: they are told in its text."""
    made = [_told(message) for message in messages]
    if tools is None:
        return made
    listed = "\n".join(json.dumps(form["function"], ensure_ascii=False) for form in tools.forms)
    told = TOLD.format(tools=listed, more=", a line for each call" if tools.parallel else "")
    if made and made[0].get("role") == "system":
        told = f"{made.pop(0)['content']}\n\n{told}"
    return [{"role": "system", "content": told}, *made]


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"{message['name']} returned: {content}"}
    if calls := message.get("tool_calls"):
        said = PLAIN.written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        return {**message, "tool_calls": None, "content": f"{content}\n{said}" if content else said}
    return dict(message)


# ---- what an answer holds -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer holds.

    Attributes:
        text: beside calls.
        calls: names and arguments; the last ones may be cut.
        thought: before the text.
    """

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    thought: str = ""


def gathered(deltas: Iterable[Delta]) -> Said:
    """The pieces of an answer, put together."""
    spoken, calls = {"text": "", "thought": ""}, list[tuple[str, str]]()
    for kind, text, _ in deltas:
        if kind in spoken:
            spoken[kind] += text
        elif kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return Said(spoken["text"], tuple(calls), spoken["thought"])


@dataclass(frozen=True, slots=True)
class Calls:
    """Tools, how a model writes calls of them, and whether it thinks before.

    Attributes:
        tools: what may be called; None: nothing.
        family: the form.
        special: the vocabulary's special tokens.
        thought: of `tools.thought_of`.
    """

    tools: Tools | None
    family: Family
    special: tuple[str, ...] = ()
    thought: str = ""

    def parser(self) -> Parser:
        """A parser of one answer."""
        tools = self.tools
        if tools is None:
            return Parser(None, thought=self.thought)
        return Parser(self.family, [tool.name for tool in tools.known], tools.parallel, self.thought)

    def read(self, text: str) -> Said:
        """What a finished answer holds."""
        parser = self.parser()
        return gathered([*parser.push(text), *parser.finish()])

    def grammar(self, schema: str | None = None) -> str:
        """What an answer is held to that may call ``tools``, in llguidance's form of Lark. A tool whose
        schema crashes llguidance, or takes it too long, is held to any object.

        Args:
            schema: JSON schema of an answer that calls nothing; None: any text.
        """
        tools: Any = self.tools
        known = list[Tool]()
        wrong = faults([json.dumps(tool.bound) for tool in tools.known])
        for tool, why in zip(tools.known, wrong, strict=True):
            if why:
                logger.warning("the parameters of the tool %r are not enforced: %s", tool.name, why)
            known.append(replace(tool, parameters={"type": "object"}) if why else tool)
        return self.family.grammar(replace(tools, known=tuple(known)), self.special, schema)


def calls_of(tools: Tools | None, tokenizer: Any, thought: str = "") -> Calls | None:
    """What an answer may hold beside text, in the form of a model; None: nothing."""
    if tools is None and not thought:
        return None
    return Calls(tools, family_of(tokenizer), tuple(special_tokens(tokenizer)), thought)


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


def call_id(answer: str, index: int) -> str:
    """The id of a call: the same one each time the answer is read."""
    return "call_" + hashlib.sha256(f"{answer}\0{index}".encode()).hexdigest()[:24]


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
