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
from typing import Annotated, Any

import msgspec

from tokenswift.chat.parser import Delta, Parser
from tokenswift.chat.tools import MOST, PLAIN, Family, Tool, Tools, family_of, template_of
from tokenswift.checks import shown
from tokenswift.config import SamplingParams
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import joined
from tokenswift.sampling.masks import faults, special_tokens
from tokenswift.types import Generation, InputError

logger = logging.getLogger("tokenswift")
CALL = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{}'}}"
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


class _Function(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    arguments: str | dict[str, Any]


class _Call(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    function: _Function

    def form(self) -> dict[str, Any]:
        """The call for a template, its arguments as the object that they mean, or else as text."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                found = json.loads(arguments or "{}")
                arguments = found if isinstance(found, dict) else arguments
        return ToolCall(self.id, self.function.name, arguments).form  # type: ignore[arg-type]


def _message(message: Any, where: str, name: str, called: dict[str, str]) -> dict[str, Any]:
    """A message for the template; ``called``: ids of calls with names, to which its own are added."""
    if not isinstance(message, Mapping):
        valid = "a message such as {'role': 'user', 'content': 'Hello'}"
        raise InputError(f"{where} is {shown(message)}; valid: {valid}", name)
    made = {**message, **({"content": joined(message["content"])} if "content" in message else {})}
    calls = made.pop("tool_calls", None)
    if calls:
        try:
            if len(calls) > MOST or made.get("role") != "assistant":
                raise ValueError
            known = msgspec.convert(calls, list[_Call])
        except (TypeError, ValueError) as error:  # msgspec's, too
            valid = f"up to {MOST} calls of an assistant's message, such as {CALL}"
            raise InputError(f"{where}.tool_calls is {shown(calls)}; valid: {valid}", name) from error
        called |= {call.id: call.function.name for call in known}
        made |= {"content": made.get("content") or "", "tool_calls": [call.form() for call in known]}
    if made.get("role") == "tool":
        answered = made.get("tool_call_id")
        if not isinstance(answered, str) or answered not in called:
            valid = "the id of a call in an earlier message"
            raise InputError(f"{where}.tool_call_id is {shown(answered)}; valid: {valid}", name)
        made["name"] = called[answered]
    return made


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

    def tool_calls(self, answer: str) -> tuple[ToolCall, ...]:
        """The calls, with ids that tell them from those of other answers."""
        return tuple(ToolCall(call_id(answer, i), *call) for i, call in enumerate(self.calls))


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


def message_of(text: str, calls: Sequence[ToolCall], thought: str) -> dict[str, Any]:
    """An answer as a message of its conversation."""
    made: dict[str, Any] = {"role": "assistant", "content": text}
    made |= {"reasoning_content": thought} if thought else {}
    return made | ({"tool_calls": [call.form for call in calls]} if calls else {})


@dataclass(frozen=True, slots=True)
class Calls:
    """What an answer may hold beside text: calls of tools, in a family's form, and a thought before.

    Attributes:
        tools: what may be called; None: nothing.
        family: the form.
        special: the vocabulary's special tokens.
        thought: of `tools.thought_of`.
    """

    tools: Tools | None = None
    family: Family = PLAIN
    special: tuple[str, ...] = ()
    thought: str = ""

    @classmethod
    def of(cls, tools: Tools | None, tokenizer: Any, thought: str = "") -> Calls:
        """In the form of a model."""
        return cls(tools, family_of(tokenizer), tuple(special_tokens(tokenizer)), thought)

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

    def bound(self, sampling: SamplingParams) -> SamplingParams:
        """A sampling under which every call of an answer is valid, and the model may think before what it is
        held to.

        Raises:
            InputError: calls do not go with its grammar.
        """
        given = sampling.grammar
        if self.tools is None and not self.thought:
            return sampling
        if self.tools is not None:
            if given is not None and given.kind != "json_schema":
                text = f"a grammar ({given.kind}) is given beside tools; valid: one of the two"
                raise InputError(text, "tools")
            given = Grammar.lark(self.grammar(None if given is None else given.text))
        return replace(sampling, grammar=None if given is None else replace(given, thought=self.thought))

    def grammar(self, schema: str | None = None) -> str:
        """What an answer is held to that may call ``tools``, in llguidance's form of Lark. A tool whose
        schema llguidance does not compile is held to any object.

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
        return message_of(self.text, self.tool_calls, self.reasoning)
