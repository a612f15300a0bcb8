"""Conversations as a chat template can write them: templates refuse, or drop without a word, roles and orders
that they were not written for. What a template does is seen by a probe of the same roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tokenswift.types import InputError

Turns = list[dict[str, Any]]


def fitted(messages: Sequence[Mapping[str, Any]], render: Callable[[Turns], str]) -> Turns:
    """Messages in the first form that the template writes whole: as they are; with one system message; also
    with neighbours of one role joined; also with the system message in the first user turn. As they are where
    it writes none of these.

    Args:
        messages: with the keys role and content, a text.
        render: gives the text that the template makes of messages.
    """
    given: Turns = [
        {**one, "role": "system" if one["role"] == "developer" else one["role"]} for one in messages
    ]
    made = given
    for form in (list, _one_system, _joined, _told_by_the_user):
        made = form(made)
        if _are_written(made, render):
            return made
    return given


def _are_written(messages: Turns, render: Callable[[Turns], str]) -> bool:
    """Whether a template writes what is said to the model in a conversation of these roles, and later system
    messages otherwise than somebody else's."""
    marks = [f"31415{i:05}92653" for i in range(len(messages))]
    probe = [{**one, "content": mark} for one, mark in zip(messages, marks, strict=True)]
    try:
        text = render(probe)
    except InputError:
        return False
    told = [one["content"] for one in probe if one["role"] != "assistant"]
    return all(mark in text for mark in told) and not any(
        _is_same(text, [*probe[:1], *(_as(role, one) for one in probe[1:])], render)
        for role in ("user", "assistant")
        if any(one["role"] == "system" for one in probe[1:])
    )


def _as(role: str, message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": role} if message["role"] == "system" else message


def _is_same(text: str, messages: Turns, render: Callable[[Turns], str]) -> bool:
    try:
        return render(messages) == text
    except InputError:
        return False


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(one["content"] for one in messages if one["content"])


def _one_system(messages: Turns) -> Turns:
    """All system messages as one, in front."""
    systems = [one for one in messages if one["role"] == "system"]
    rest = [one for one in messages if one["role"] != "system"]
    return [*([{**systems[0], "content": _text(systems)}] if systems else []), *rest]


def _joined(messages: Turns) -> Turns:
    """Neighbours of one role as one message, but for calls and their results."""
    made: Turns = []
    for (role, calls), found in groupby(messages, lambda one: (one["role"], bool(one.get("tool_calls")))):
        group = list(found)
        alone = role == "tool" or calls
        made += group if alone else [{**group[0], "content": _text(group)}]
    return made


def _told_by_the_user(messages: Turns) -> Turns:
    """The system message as the beginning of the first user turn."""
    systems = [one for one in messages if one["role"] == "system"]
    rest = [one for one in messages if one["role"] != "system"]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _text([*systems, rest[0]])}, *rest[1:]]
    return [{"role": "user", "content": _text(systems)}, *rest] if systems else rest
