"""Conversations as a chat template can write them, and control tokens that come from the template alone.

Templates refuse, or drop without a word, roles and orders that they were not written for; what a template
does is seen by a probe of the same roles (:func:`fitted`).

What messages and tools say is encoded as text. The first character of each control token's text in what a
client wrote is replaced by a character that nobody uses, before the template runs (:func:`set_apart`). The
places where these come out are encoded without added tokens (:func:`encoded`); all else is encoded as ever,
so that a chat without such text has the ids that it always had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tokenswift.checks import shown
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


PRIVATE = range(0xE000, 0xF900)  # of the characters that Unicode leaves to everybody


def set_apart(given: Any, tokenizer: Any, template: str = "") -> tuple[Any, dict[str, str]]:
    """What a template is given, its control tokens broken.

    Args:
        given: messages and tools, as JSON has them.
        template: which may use private characters itself.
    Returns:
        The same with each control token's first character replaced, and what the replacements stand for.
    Raises:
        InputError: a text becomes a control token as the tokenizer normalizes it, or there are too many
            levels.
    """
    marks = [token.content for token in _added(tokenizer).values() if _controls(token)]
    texts: list[str] = []
    try:
        _mapped(given, lambda text: texts.append(text) or text)
    except RecursionError as error:
        raise InputError("messages are nested too deeply; valid: texts, numbers, lists") from error
    if not marks:
        return given, {}
    firsts, longest = {mark[0] for mark in marks}, max(map(len, marks))
    whole = _any_of(marks)

    def broken(text: str) -> set[int]:
        """Where control tokens begin in a text, one that its end may begin included."""
        rest = range(max(0, len(text) - longest + 1), len(text))
        cut = {i for i in rest if text[i] in firsts and any(mark.startswith(text[i:]) for mark in marks)}
        return cut | {found.start() for found in whole.finditer(text)}

    _check_normalized(texts, tokenizer)
    if not any(map(broken, texts)):
        return given, {}
    used = "\0".join([*texts, template]).lower()
    free = (chr(at) for at in PRIVATE if chr(at) not in used and json.dumps(chr(at))[1:-1] not in used)
    stand_in = dict(zip(sorted(firsts), free, strict=False))

    def replaced(text: str) -> str:
        at = broken(text)
        return "".join(stand_in[c] if i in at else c for i, c in enumerate(text)) if at else text

    return _mapped(given, replaced), {new: old for old, new in stand_in.items()}


def encoded(
    text: str, tokenizer: Any, encode: Callable[..., list[int]], stands_for: Mapping[str, str]
) -> list[int]:
    """Token ids of what a template made of what :func:`set_apart` returned.

    Args:
        encode: encodes a text as the tokenizer does; keywords are the tokenizer's own.
        stands_for: of :func:`set_apart`.
    Raises:
        InputError: the tokenizer makes a control token of plain text.
    """
    for new, old in stands_for.items():  # where a template writes JSON in ASCII
        text = text.replace(json.dumps(new)[1:-1], new if old.isascii() else json.dumps(old)[1:-1])
    if not stands_for or not any(new in text for new in stands_for):
        return encode(text)
    added = _added(tokenizer)
    letters = "".join(stands_for)
    between = _any_of(
        [token.content for token in added.values()],
        {token.content: (token.lstrip, token.rstrip) for token in added.values()},
    )
    ids: list[int] = []
    start = done = 0
    for end in [*(found.span() for found in between.finditer(text)), (len(text), len(text))]:
        piece = text[start : end[0]]
        if any(letter in piece for letter in letters):
            plain = piece.translate(str.maketrans(dict(stands_for)))
            ids += encode(text[done:start]) if start > done else []
            made = _without_added(plain, tokenizer, encode, first=start == 0)
            if (wrong := next((at for at in made if at in added and _controls(added[at])), None)) is not None:
                raise InputError(
                    f"a message holds {shown(added[wrong].content)}, which the model's tokenizer cannot "
                    "write as text; valid: a message without it"
                )
            ids, done = ids + made, end[0]
        start = end[1]
    return ids + (encode(text[done:]) if done < len(text) else [])


def first_control(text: str, tokenizer: Any) -> int | None:
    """The id of the control token that a text begins with; None: it begins with none."""
    found = [
        (len(t.content), at)
        for at, t in _added(tokenizer).items()
        if _controls(t) and text.startswith(t.content)
    ]
    return max(found)[1] if found else None


def _added(tokenizer: Any) -> dict[int, Any]:
    """Tokens beside a tokenizer's model, by id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.get_added_tokens_decoder()
    return getattr(tokenizer, "added_tokens_decoder", {})


def _controls(token: Any) -> bool:
    return token.special and not token.content.isspace()


def _any_of(texts: Sequence[str], strips: Mapping[str, tuple[bool, bool]] | None = None) -> re.Pattern[str]:
    """A pattern of any of some texts, the longest first, with the spaces that they take along."""

    def one(text: str) -> str:
        before, after = (strips or {}).get(text, (False, False))
        return (r"\s*" if before else "") + re.escape(text) + (r"\s*" if after else "")

    return re.compile("|".join(one(text) for text in sorted(texts, key=len, reverse=True)))


def _check_normalized(texts: Sequence[str], tokenizer: Any) -> None:
    """Refuse texts that hold a control token in another spelling, where a tokenizer looks for those in
    normalized text."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    marks = [t.content for t in _added(tokenizer).values() if t.normalized and _controls(t)]
    if normalizer is None or not marks:
        return
    plain, normal = _any_of(marks), _any_of([normalizer.normalize_str(mark) for mark in marks])
    for text in texts:
        if len(normal.findall(normalizer.normalize_str(text))) > len(plain.findall(text)):
            raise InputError(
                f"{shown(text)} holds a control token of the model in another spelling; valid: a text without"
            )


def _without_added(text: str, tokenizer: Any, encode: Callable[..., list[int]], first: bool) -> list[int]:
    """Ids of a text in which no added token is looked for; ``first``: nothing stands before it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return encode(text, split_special_tokens=True)
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    cut = backend.pre_tokenizer
    if not first and getattr(cut, "prepend_scheme", None) == "first":
        cut = type(cut)(replacement=cut.replacement, prepend_scheme="never", split=cut.split)
    parts = [text] if cut is None else [part for part, _ in cut.pre_tokenize_str(text)]
    return [token.id for part in parts for token in backend.model.tokenize(part)]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with its texts changed, but for names of roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _mapped(key, change): inner if _is_role(key, inner) else _mapped(inner, change)
            for key, inner in value.items()
        }
    return [_mapped(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def _is_role(key: object, value: object) -> bool:
    return key == "role" and isinstance(value, str) and value.isidentifier()
