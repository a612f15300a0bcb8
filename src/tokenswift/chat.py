"""Chats in which functions may be called, and models that think before they answer.

A conversation is checked and put into the form of the model's template (:func:`conversation`). An
answer is bound by a grammar to calls that are valid (:class:`Calls`), and read as it comes into a
thought, text and calls (:class:`Parser`). Everything in messages and tools is a stranger's: a name
becomes part of a grammar and of a prompt, a schema is compiled. So is an answer: what it holds is a
call only where it names a tool.

All families of models write a call as ``{"name": NAME, KEY: {arguments}}``; they differ in the key,
in what stands around it, and in whether text may come before. An answer that is such JSON and
nothing else is calls in every family, also indented or fenced as code: coder models write so. Which
family a model belongs to is seen from its chat template.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from tokenswift.config import SamplingParams
from tokenswift.grammar import CLOSE, OPEN, Grammar, closed
from tokenswift.loader import prompts
from tokenswift.sampling.masks import SPACING, special_tokens
from tokenswift.types import Generation, InputError, check_flag, shown

logger = logging.getLogger("tokenswift")
MOST = 128  # tools of a chat
CHOICES = ("none", "auto", "required")
FORM = "{'type': 'function', 'function': {'name': …, 'parameters': {…}}}"
NAMED = "{'type': 'function', 'function': {'name': …}} with the name of a tool"
CALL = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{}'}}"

# ---- the tools of a chat -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tools:
    """What a model may call in an answer.

    Attributes:
        known: by name, as chat templates take them.
        choice: "auto" (as the model likes), "required" (one at least), or the name of the one to be
            called.
        parallel: several calls in an answer.
    """

    known: Mapping[str, dict[str, Any]]
    choice: str = "auto"
    parallel: bool = True

    @property
    def callable(self) -> list[str]:
        """Names of those that the choice admits."""
        return [self.choice] if self.choice in self.known else [*self.known]

    @property
    def forms(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [*self.known.values()]

    def bound(self, name: str) -> dict[str, Any]:
        """The schema that arguments are held to, with no members that it does not list unless it
        says so, and without keywords that llguidance does not know."""
        copied = json.loads(json.dumps(self.known[name]["function"]["parameters"]))
        return closed({"type": "object", **copied, "x-guidance": {"lenient": True}})


def tools_of(tools: Any, choice: Any = None, parallel: Any = None) -> Tools | None:
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
    if not isinstance(tools, list | tuple | None) or len(tools or ()) > MOST:
        raise _wrong("tools", tools, f"a list of tools such as {FORM}, up to {MOST}")
    several = True if parallel is None else check_flag("parallel_tool_calls", parallel)
    forms = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    known = {form["function"]["name"]: form for form in forms}
    if len(known) < len(forms):
        raise _wrong("tools", [form["function"]["name"] for form in forms], "different names")
    chosen = _choice(choice, known)
    return Tools(known, chosen, several) if known and chosen != "none" else None


def _wrong(where: str, value: Any, valid: str) -> InputError:
    return InputError(f"{where} is {shown(value)}; valid: {valid}", where.partition("[")[0])


def _function(value: Any) -> Any:
    """What is said of a function, in either form; None: nothing."""
    found = value.get("function", value) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else None


class _Function(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A tool as chat templates take it."""
    try:
        said = msgspec.convert(_function(tool), _Function)
        parameters = said.parameters or {"type": "object", "properties": {}}
        Grammar.json_schema(parameters)
        if (
            tool.get("type") != "function"
            or said.name in CHOICES
            or parameters.get("type", "object") != "object"
        ):
            raise ValueError("a function's name is its own, and its parameters are an object's")
    except (ValueError, InputError) as error:  # msgspec's, too
        raise InputError(
            f"{where} is {shown(tool)} ({error}); valid: a function, such as {FORM}", "tools"
        ) from error
    function = {"name": said.name, "description": said.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _choice(choice: Any, known: Mapping[str, Any]) -> str:
    valid = CHOICES if known else CHOICES[:2]
    if choice is None or (isinstance(choice, str) and choice in valid):
        return choice or "auto"
    name = (_function(choice) or {}).get("name")
    if not isinstance(name, str) or name not in known:
        raise _wrong("tool_choice", choice, f"{', '.join(valid)}, or {NAMED}")
    return name


# ---- what a template is given --------------------------------------------------------------------


def conversation(
    messages: Sequence[Any], tools: Tools | None, tokenizer: Any, name: str = "messages"
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]] | None]:
    """Messages, and the tools beside them, as a model's template takes them.

    Arguments of calls become objects, but for those that are none, such as one of ours that was cut
    by the length, and results get the name of what was called.

    Args:
        messages: in the form of OpenAI's interface.
        name: of the argument.
    Raises:
        InputError: a message, a call or a result that is none.
    """
    called = dict[str, str]()
    made = [_message(one, f"{name}[{i}]", name, called) for i, one in enumerate(messages)]
    if tools is not None and "tools" not in template_of(tokenizer):
        logger.warning("the model's chat template has no place for tools: it is not told of them")
    return made, None if tools is None else [*tools.forms]


def _message(message: Any, where: str, name: str, called: dict[str, str]) -> dict[str, Any]:
    """A message for the template; ``called``: ids of calls with names, to which its own are
    added."""
    if not isinstance(message, Mapping):
        valid = "a message such as {'role': 'user', 'content': 'Hello'}"
        raise InputError(f"{where} is {shown(message)}; valid: {valid}", name)
    made = {
        **message,
        **({"content": prompts.joined(message["content"])} if "content" in message else {}),
    }
    calls = made.pop("tool_calls", None)
    if calls:
        try:
            known = [
                (call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in calls
            ]
            if (
                len(known) > MOST
                or made.get("role") != "assistant"
                or not all(map(_is_call, known))
            ):
                raise ValueError
        except (TypeError, KeyError, ValueError) as error:
            valid = f"up to {MOST} calls of an assistant's message, such as {CALL}"
            raise InputError(
                f"{where}.tool_calls is {shown(calls)}; valid: {valid}", name
            ) from error
        called |= {at: function for at, function, _ in known}
        forms = [_form(at, function, _object(arguments)) for at, function, arguments in known]
        made |= {"content": made.get("content") or "", "tool_calls": forms}
    if made.get("role") == "tool":
        answered = made.get("tool_call_id")
        if not isinstance(answered, str) or answered not in called:
            valid = "the id of a call in an earlier message"
            raise InputError(f"{where}.tool_call_id is {shown(answered)}; valid: {valid}", name)
        made["name"] = called[answered]
    return made


def _is_call(call: tuple[Any, Any, Any]) -> bool:
    *names, arguments = call
    short = all(isinstance(name, str) and 0 < len(name) <= 128 for name in names)
    return short and isinstance(arguments, str | dict)


def _object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """The object that arguments mean, or else their text."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(arguments or "{}")
            return found if isinstance(found, dict) else arguments
    return arguments


def _form(name: str, function: str, arguments: Any) -> dict[str, Any]:
    """A call as messages hold it."""
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


# ---- families ------------------------------------------------------------------------------------

TAIL = 16  # tokens at a prompt's end, among which the mark of a thought is


@dataclass(frozen=True, slots=True)
class Family:
    """A family's form of calls.

    Attributes:
        key: of the arguments.
        opening: what a call begins with, anywhere in an answer; "": calls begin an answer.
        closing: what ends it.
        between: what stands between two calls.
        begins: a token that may stand before the first call of an answer, or "".
    """

    key: str = "arguments"
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    begins: str = ""

    def grammar(self, tools: Tools, special: Sequence[str] = (), schema: str | None = None) -> str:
        """The grammar of an answer, in llguidance's form of Lark.

        A forced answer is calls from the first token on; else an answer is free until a call begins
        as the family writes it, and is held to the calls from there.

        Args:
            special: the vocabulary's special tokens: a grammar names them, and text does not hold
                them.
            schema: JSON schema of an answer that calls nothing; None: any text.
        """
        tag, rest = self.opening.strip(), self.opening[len(self.opening.rstrip()) :]
        begin, between = _spelt(self.opening, special), _quoted(self.between)
        bare, call = (f"one {_spelt('}' + end, special)}" for end in ("", self.closing))
        if tools.parallel:
            bare, call = f"{bare} ({between} {bare})*", f"{call} ({between} {begin} {call})*"
        token, lines = f"{self.begins}?" if self.begins in special else "", ["%llguidance {}"]
        if tools.choice != "auto":  # a call from the first token on
            lines.append(f"start: {begin} {call}")
        elif schema is not None:
            answer = _json(closed(json.loads(schema)))
            lines += [f"start: answer | {token} {begin} {call}", f"answer: {answer}"]
        else:
            heads = "|".join(re.escape("".join(self._head(name))) for name in tools.callable)
            lines.append(
                f"start: TEXT | {token} {bare}{f' | opened {_quoted(rest)} {call}' if tag else ''}"
            )
            lines.append(rf"TEXT: /(.|\n)*/ & ~/({heads})(.|\n)*/")
            if tag:
                lines.append(f"opened: trigger{f' | TEXT? {tag}' if tag in special else ''}")
                lines.append(f"trigger[lazy]: TEXT {_quoted(tag)}")
        lines.append(f"one: {' | '.join(f'call_{i}' for i in range(len(tools.callable)))}")
        for i, name in enumerate(tools.callable):
            head = self._head(
                name
            )  # beside a schema, whose words are tokens, a longer one would hide these
            words = map(_quoted, head if schema is not None else ["".join(head)])
            lines.append(f"call_{i}: {' '.join(words)} {_json(tools.bound(name))}")
        return "\n".join(lines) + "\n"

    def _head(self, name: str) -> tuple[str, ...]:
        """What stands before the arguments of a call, as words of JSON."""
        return "{", '"name"', ": ", json.dumps(name), ", ", json.dumps(self.key), ": "


def _json(schema: dict[str, Any]) -> str:
    given = {**schema.get("x-guidance", {}), **SPACING}
    return "%json " + json.dumps({**schema, "x-guidance": given}, ensure_ascii=False)


def _spelt(text: str, special: Sequence[str]) -> str:
    """A text that has to come, the special tokens in it as such."""
    parts = re.split(r"(<[^<>]*>)", text)
    return " ".join(part if part in special else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


#: Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, after text or
#: not
HERMES = Family(opening="<tool_call>\n", closing="\n</tool_call>")
#: an answer that is ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``
LLAMA3 = Family(key="parameters", between="; ", begins="<|python_tag|>")
#: models of which nothing is known: an answer that is ``{"name": …, "arguments": {…}}``, a call a
#: line
PLAIN = Family()


def template_of(tokenizer: Any) -> str:
    """The template that a tokenizer has for chats with tools; "" where it has none."""
    found = prompts.template_of(tokenizer, tools=True)
    return found if isinstance(found, str) else ""


def family_of(tokenizer: Any) -> Family:
    """The family whose form of calls a model's template speaks of; a plain one where it speaks of
    none."""
    template = template_of(tokenizer)
    if "tools" in template and HERMES.opening.strip() in template:
        return HERMES
    return (
        LLAMA3
        if "tools" in template and ("ipython" in template or LLAMA3.begins in template)
        else PLAIN
    )


def thought_of(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Where the thought of an answer begins: "may" (the answer may begin with one), "begun" (the
    prompt has), "" (there is none).

    Args:
        prompt: ids of a chat.
    """
    if CLOSE not in template_of(tokenizer):
        return ""
    end = tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip()
    return "begun" if end.endswith(OPEN) else "" if end.endswith(CLOSE) else "may"


# ---- an answer as it comes -----------------------------------------------------------------------

SPACE = " \t\r\n"
# characters of whitespace that may stand between two parts of a call: what is longer is text
LONGEST = 99
S = f"[{SPACE}]{{0,{LONGEST}}}+"
OPENED, CLOSED, FENCE = (S + mark for mark in (OPEN, CLOSE, "```"))
Waits = Generator[None, None, Any]  # each yield waits for more of the text


class Delta(NamedTuple):
    """A piece of an answer.

    Attributes:
        kind: "thought"; "text"; "call" (one begins: its name), "arguments" (more of its arguments'
            JSON), "end" (of it).
        text: the piece.
        index: of the call, from 0 on.
    """

    kind: Literal["thought", "text", "call", "arguments", "end"]
    text: str = ""
    index: int = 0


class Parser:
    """Reads an answer as it comes: a thought, text and calls. Whatever the pieces are that it comes
    in, they make the same text and calls.

    ::

        parser = Parser(HERMES, ["weather"])
        deltas = [*parser.push("I'll see.\\n<tool_call>…"), *parser.finish()]

    Args:
        family: the form of calls; None: there are none.
        names: of the tools; what names no tool is text.
        parallel: whether a second call is one.
        thought: of `thought_of`.
    """

    def __init__(
        self,
        family: Family | None,
        names: Sequence[str] = (),
        parallel: bool = True,
        thought: str = "",
    ) -> None:
        self._held, self._ended = "", False  # not yet told: it may belong to a call
        self._found: list[Delta] = []
        self._reader = self._answer(family, names, parallel, thought)

    def push(self, text: str) -> list[Delta]:
        """More of the answer; what is certain by now."""
        self._held += text
        next(self._reader, None)
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Delta]:
        """The end of the answer: what was held back is text, unless it stands in a call or behind
        one."""
        self._ended = True
        return self.push("")

    def _answer(
        self, family: Family | None, names: Sequence[str], parallel: bool, thought: str
    ) -> Waits:
        if thought:
            begun = thought == "begun" or (yield from self._take(OPENED))
            yield from self._strip(SPACE)
            if begun:
                yield from self._tell("thought", CLOSED)
                yield from self._take(CLOSED)
                yield from self._strip(SPACE)
        if family is not None:
            yield from self._calls(family, names, parallel)
        yield from self._tell("text")

    def _calls(self, family: Family, names: Sequence[str], parallel: bool) -> Waits:
        """Text and calls, as long as a call may come."""
        known, tag = "|".join(map(re.escape, names)), re.escape(family.opening.strip())
        head = rf'{S}\{{{S}"name"{S}:{S}"(?P<name>{known})"{S},{S}"{family.key}"{S}:{S}(?=\{{)'
        fence = rf"{S}({re.escape(family.begins)})?{S}(```(json)?)?"  # before a call without marks
        bare, mark, tagged = fence + head, S + tag, S + tag + head
        end, index = rf"{S}\}}{S}", 0
        while found := (yield from self._take(bare)):
            yield from self._call(found["name"], index, end)
            yield from self._take(FENCE)
            yield from self._strip(SPACE + ";")
            index += 1
            if not parallel:
                return
        if index or not tag:
            return
        end += re.escape(family.closing.strip())
        while (yield from self._tell("text", mark)) and (parallel or not index):
            if found := (yield from self._take(tagged)):
                yield from self._call(found["name"], index, end)
                yield from self._strip(SPACE)
                index += 1
            else:  # the tag opens nothing
                self._found.append(Delta("text", (yield from self._take(mark))[0]))

    def _call(self, name: str, index: int, end: str) -> Waits:
        """The arguments of a call, up to the brace that closes them, and what stands behind."""
        self._found.append(Delta("call", name, index))
        depth, quoted, escaped, whole = 0, False, False, False
        while not whole and (self._held or not self._ended):
            at = 0
            for letter in self._held:
                at += 1
                if escaped or (quoted and letter == "\\"):
                    escaped = not escaped
                elif letter == '"':
                    quoted = not quoted
                elif not quoted:
                    depth += (letter in "{[") - (letter in "]}")
                if whole := not depth:
                    break
            if at:
                self._found.append(Delta("arguments", self._held[:at], index))
                self._held = self._held[at:]
            if not whole:
                yield
        if whole:
            if not (yield from self._take(end)) and self._ended:
                self._held = ""  # a part of it
            self._found.append(Delta("end", "", index))

    def _look(self, how: Literal["match", "search"], pattern: str) -> Any:
        """Where a pattern stands, or the beginning of it where more of the answer may come."""
        import regex  # which takes longer to import than this whole package

        return getattr(regex, how)(pattern, self._held, partial=not self._ended)

    def _take(self, pattern: str) -> Waits:
        """What stands here of a pattern, which goes; None where something else does."""
        while (found := self._look("match", pattern)) and found.partial:
            yield
        self._held = self._held[found.end() if found else 0 :]
        return found

    def _tell(self, kind: Literal["thought", "text"], mark: str | None = None) -> Waits:
        """Tell what stands before a mark, as it comes; whether the mark does."""
        while True:
            place = mark and self._look("search", mark)
            here = place and not place.partial
            text = self._held[: place.start()] if place else self._held
            self._held = self._held[len(text) :]
            text = text.rstrip(SPACE) if self._ended and kind == "thought" else text
            if text:
                self._found.append(Delta(kind, text))
            if here or self._ended:
                return here
            yield

    def _strip(self, letters: str) -> Waits:
        """Leave out letters that stand here."""
        while not (rest := self._held.lstrip(letters)) and not self._ended:
            self._held = ""
            yield
        self._held = rest


# ---- what an answer holds ------------------------------------------------------------------------


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
        return _form(self.id, self.name, self.arguments)


def call_id(answer: str, index: int) -> str:
    """The id of a call: the same one each time the answer is read."""
    return "call_" + hashlib.sha256(f"{answer}\0{index}".encode()).hexdigest()[:24]


def gathered(deltas: Iterable[Delta], answer: str) -> tuple[str, tuple[ToolCall, ...], str]:
    """The pieces of an answer, put together: its text beside calls, the calls, of which the last
    may be cut, and the thought before.

    Args:
        answer: what tells ids of its calls from those of other answers.
    """
    spoken, calls = {"text": "", "thought": ""}, list[ToolCall]()
    for kind, text, index in deltas:
        if kind in spoken:
            spoken[kind] += text
        elif kind == "call":
            calls.append(ToolCall(call_id(answer, index), text, ""))
        elif kind == "arguments":
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + text)
    return spoken["text"], tuple(calls), spoken["thought"]


def message_of(text: str, calls: Sequence[ToolCall], thought: str) -> dict[str, Any]:
    """An answer as a message of its conversation."""
    made: dict[str, Any] = {"role": "assistant", "content": text}
    made |= {"reasoning_content": thought} if thought else {}
    return made | ({"tool_calls": [call.form for call in calls]} if calls else {})


@dataclass(frozen=True, slots=True)
class Calls:
    """What an answer may hold beside text: calls of tools, in a family's form, and a thought
    before.

    Attributes:
        tools: what may be called; None: nothing.
        family: the form.
        special: the vocabulary's special tokens.
        thought: of `thought_of`.
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
        if self.tools is None:
            return Parser(None, thought=self.thought)
        return Parser(self.family, [*self.tools.known], self.tools.parallel, self.thought)

    def read(self, text: str, answer: str) -> tuple[str, tuple[ToolCall, ...], str]:
        """What a finished answer holds; see `gathered`."""
        parser = self.parser()
        return gathered([*parser.push(text), *parser.finish()], answer)

    def bound(self, sampling: SamplingParams) -> SamplingParams:
        """A sampling under which every call of an answer is valid, and the model may think before
        what it is held to.

        Raises:
            InputError: calls do not go with its grammar.
        """
        given = sampling.grammar
        if self.tools is not None:
            if given is not None and given.kind != "json_schema":
                text = f"a grammar ({given.kind}) is given beside tools; valid: one of the two"
                raise InputError(text, "tools")
            schema = None if given is None else given.text
            given = Grammar.lark(self.family.grammar(self.tools, self.special, schema))
        return replace(
            sampling, grammar=None if given is None else replace(given, thought=self.thought)
        )


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
        """The answer as a message of the conversation, for the next call of ``LLM.chat``; a result
        follows it as ``{"role": "tool", "tool_call_id": call.id, "content": …}``."""
        return message_of(self.text, self.tool_calls, self.reasoning)
