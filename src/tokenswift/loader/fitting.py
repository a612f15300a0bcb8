"""Conversations in a form that a chat template writes whole.

There is a first form, in which the template takes calls and results by itself, and others, which
say more and more of the conversation in words. Each is tried with marks in the place of all that
was said (see `abilities`); the first of which every mark comes out is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tokenswift.loader.abilities import (
    PARAMETER,
    TOOL,
    Abilities,
    Render,
    Turns,
    probe_tool,
    text_or_none,
    tools_as_text,
)
from tokenswift.loader.call_forms import Family

#: marks of a message, of the name of a call, and of its argument, by their numbers
MARK = "31415{:05}92653"
CALL_MARK = "mark31415{:05}{:03}26535"
ARGUMENT_MARK = "31415{:05}{:03}897"
#: what the model is told where its template has no place for tools
TOOLS_NOTE = """You can call functions. As JSON, they are:
{tools}
To call one, answer with nothing but {example}"""
TOOLS_IN_WORDS = "the model's chat template has no place for tools: a system message tells of them"
CALLS_IN_WORDS = "the model's chat template does not write calls of tools: they are told as text"
LOST = "the model's chat template leaves out a part of the conversation, whatever its form"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A conversation for a template.

    Attributes:
        turns: its messages.
        variables: variables of the template.
        warnings: lines on what is told in words, and on what is lost.
    """

    turns: Turns
    variables: dict[str, object]
    warnings: tuple[str, ...]


def fitted(
    turns: Turns,
    tools: Sequence[Mapping[str, object]] | None,
    variables: Mapping[str, object],
    abilities: Abilities,
    family: Family,
) -> Fitted:
    """A conversation in the first form that the template writes whole; as it is where it writes
    none.

    Args:
        turns: checked messages (`messages.checked`).
        tools: what may be called, as templates take it; None: nothing.
        variables: of the template, besides.
        abilities: the template's.
        family: how calls are spelled in words.
    """
    warnings: list[str] = []
    filled = dict(variables)
    probes = dict(variables)
    messages = list(turns)
    if tools:
        if abilities.tool_variable is not None:
            filled[abilities.tool_variable] = list(tools)
            probes[abilities.tool_variable] = [probe_tool()]
        elif abilities.system_tools:
            messages = _with_system_tools(messages, tools)
        else:
            warnings.append(TOOLS_IN_WORDS)
            messages = _with_tools_in_words(messages, tools, family)
    heard: Turns | None = None
    for form, as_text in _forms(messages, abilities, family):
        trial = Trial(form, probes, filled != probes, abilities.render)
        if trial.complete:
            return Fitted(form, filled, (*warnings, *([CALLS_IN_WORDS] if as_text else [])))
        if heard is None and trial.heard:
            heard = form
    return Fitted(messages if heard is None else heard, filled, (*warnings, LOST))


# ---- forms ---------------------------------------------------------------------------------------


def _forms(messages: Turns, abilities: Abilities, family: Family) -> Iterator[tuple[Turns, bool]]:
    """Forms of a conversation, the usual ones first, and whether calls are told as text."""
    tried: list[Turns] = []
    for turns, as_text in _forms_of_calls(messages, abilities, family):
        for form in _forms_of_turns(turns):
            if form not in tried:
                tried.append(form)
                yield form, as_text


def _forms_of_calls(
    messages: Turns, abilities: Abilities, family: Family
) -> Iterator[tuple[Turns, bool]]:
    """The ways in which calls and results can be told."""
    if not any(_has_calls(turn) or turn["role"] == "tool" for turn in messages):
        yield messages, False
        return
    style = abilities.calls
    if style is not None:
        turns = messages if abilities.parallel else one_call_each(messages)
        yield style.applied(turns), False
        if any(turn["content"] and _has_calls(turn) for turn in messages):
            yield style.applied(text_before(turns)), False
            yield style.applied(in_words(turns, family, only_with_text=True)), True
    if family.result_role:
        yield in_words(messages, family, family.result_role), True
    if abilities.result_role:
        yield in_words(messages, family, "tool"), True
    yield in_words(messages, family), True


def _forms_of_turns(turns: Turns) -> Iterator[Turns]:
    """Messages as they are; with one system message; also with neighbours of one role joined; also
    with the system message in the first user turn; also with a first turn of the user's that says
    nothing."""
    systems = [turn for turn in turns if turn["role"] == "system"]
    rest = [turn for turn in turns if turn["role"] != "system"]
    first: Turns = [{**systems[0], "content": _text(systems)}] if systems else []
    yield turns
    yield [*first, *rest]
    yield neighbours_joined([*first, *rest])
    yield neighbours_joined([*({**turn, "role": "user"} for turn in first), *rest])
    if rest and rest[0]["role"] == "assistant":
        yield neighbours_joined([*first, {"role": "user", "content": ""}, *rest])


def _text(turns: Sequence[Mapping[str, object]]) -> str:
    return "\n\n".join(str(turn["content"]) for turn in turns if turn["content"])


def neighbours_joined(turns: Turns) -> Turns:
    """Neighbours of one role as one message, but for calls and their results."""
    joined: Turns = []
    for (role, calls), group in groupby(turns, lambda turn: (turn["role"], _has_calls(turn))):
        several = list(group)
        if role == "tool" or calls:
            joined += several
        else:
            joined.append({**several[0], "content": _text(several)})
    return joined


def one_call_each(turns: Turns) -> Turns:
    """Messages of one call each, followed by its results."""
    split: Turns = []
    waiting = list(turns)
    while waiting:
        turn = waiting.pop(0)
        calls = turn.get("tool_calls") or []
        if len(calls) < 2:
            split.append(turn)
            continue
        results: Turns = []
        while waiting and waiting[0]["role"] == "tool":
            results.append(waiting.pop(0))
        for i, call in enumerate(calls):
            split.append({**turn, "content": "" if i else turn["content"], "tool_calls": [call]})
            matching = [one for one in results if one.get("tool_call_id") == call["id"]]
            split += matching
            results = [one for one in results if one not in matching]
        split += results
    return split


def text_before(turns: Turns) -> Turns:
    """Texts beside calls as messages of their own, before the calls."""
    apart: Turns = []
    for turn in turns:
        if turn["content"] and _has_calls(turn):
            apart.append({key: value for key, value in turn.items() if key != "tool_calls"})
            turn = {**turn, "content": ""}
        apart.append(turn)
    return apart


def in_words(
    turns: Turns, family: Family, result_role: str = "user", only_with_text: bool = False
) -> Turns:
    """Calls as text of the assistant's, as the family spells them, and results as messages of a
    role.

    Args:
        result_role: the role that results get; as the user's text they say whose they are.
        only_with_text: only those calls beside which there is text, and their results.
    """
    worded: Turns = []
    ids: set[str] = set()
    for turn in turns:
        if _has_calls(turn) and (turn["content"] or not only_with_text):
            ids |= {call["id"] for call in turn["tool_calls"]}
            worded.append(_calls_in_words(turn, family))
        elif turn["role"] == "tool" and (turn.get("tool_call_id") in ids or not only_with_text):
            worded.append(_result_in_words(turn, result_role))
        else:
            worded.append(turn)
    return worded


def _has_calls(turn: Mapping[str, object]) -> bool:
    return bool(turn.get("tool_calls"))


def _calls_in_words(turn: Mapping[str, object], family: Family) -> dict[str, object]:
    calls = turn["tool_calls"]
    functions = [call["function"] for call in calls] if isinstance(calls, list) else []
    spelled = family.spelled((one["name"], one["arguments"]) for one in functions)
    text_alone = {key: value for key, value in turn.items() if key != "tool_calls"}
    content = turn["content"]
    return {**text_alone, "content": f"{content}\n{spelled}" if content else spelled}


def _result_in_words(turn: Mapping[str, object], role: str) -> dict[str, object]:
    """A result as a role's text; one whose call nobody knows begins with its name already."""
    if role != "user":
        return {**turn, "role": role}
    name = turn.get("name")
    content = str(turn["content"])
    named = content if content.startswith(f"{name}: ") else f"{name}: {content}"
    return {"role": "user", "content": f"Result of {named}"}


def _with_system_tools(messages: Turns, tools: Sequence[Mapping[str, object]]) -> Turns:
    """Messages whose first one is the system's and has the tools in a field."""
    text = tools_as_text(tools)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": "", "tools": text}, *messages]
    return [{**messages[0], "tools": text}, *messages[1:]]


def _with_tools_in_words(
    messages: Turns, tools: Sequence[Mapping[str, object]], family: Family
) -> Turns:
    """Messages whose first one is the system's and tells of tools."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    note = TOOLS_NOTE.format(tools=listed, example=family.example)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": note}, *messages]
    content = messages[0]["content"]
    return [{**messages[0], "content": f"{content}\n\n{note}" if content else note}, *messages[1:]]


# ---- trials --------------------------------------------------------------------------------------


class Trial:
    """What a template writes of a form.

    Args:
        form: messages.
        variables: the template's.
        with_tools: whether the tool `probe_tool` is among them.
        render: renders the template.

    Attributes:
        complete: whether it writes all of it, and later system messages otherwise than somebody
            else's.
        heard: whether that is so of all but what the assistant said.
    """

    def __init__(
        self, form: Turns, variables: Mapping[str, object], with_tools: bool, render: Render
    ) -> None:
        self._variables = variables
        self._render = render
        self._needed = [TOOL, PARAMETER] if with_tools else []
        self._of_assistant: list[str] = []
        probe = [self._marked(i, turn) for i, turn in enumerate(form)]
        later = [i for i, turn in enumerate(probe) if i and turn["role"] == "system"]
        text = self._text(probe, later, "system")
        self.heard = text is not None and all(mark in text for mark in self._needed)
        if self.heard and later:
            self.heard = all(
                text != self._text(probe, later, role) for role in ("user", "assistant")
            )
        self.complete = self.heard and all(mark in str(text) for mark in self._of_assistant)

    def _text(self, probe: Turns, later: Sequence[int], role: str) -> str | None:
        """The text where later system messages are of a role; None: it is refused."""
        turns: Turns = [
            {**turn, "role": role} if i in later else turn for i, turn in enumerate(probe)
        ]
        return text_or_none(self._render, turns, self._variables)

    def _marked(self, index: int, turn: Mapping[str, object]) -> dict[str, object]:
        """A message with marks in the place of all that it says."""
        marked = dict(turn)
        if turn["content"]:
            mark = marked["content"] = MARK.format(index)
            whose = self._of_assistant if turn["role"] == "assistant" else self._needed
            whose.append(mark)
        if "tools" in turn:
            marked["tools"] = tools_as_text([probe_tool()])
            self._needed += [TOOL, PARAMETER]
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            marked["tool_calls"] = [
                self._marked_call(index, at, call) for at, call in enumerate(calls)
            ]
        return marked

    def _marked_call(self, index: int, at: int, call: Mapping[str, object]) -> dict[str, object]:
        function = call["function"]
        name = CALL_MARK.format(index, at)
        argument = ARGUMENT_MARK.format(index, at)
        self._needed += [name, argument]
        arguments: object = {"text": argument}
        if isinstance(function, Mapping) and isinstance(function["arguments"], str):
            arguments = json.dumps(arguments)
        return {**call, "function": {"name": name, "arguments": arguments}}
