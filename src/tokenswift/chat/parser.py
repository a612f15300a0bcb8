"""Thoughts and calls of tools in an answer, read as it comes.

What is read is text of any origin: it is a call only where it names a tool, and its arguments are passed on
as they are written. Whatever the pieces are that an answer comes in, they make the same text and calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tokenswift.chat.families import Family
from tokenswift.grammar import CLOSE, OPEN

SPACE = " \t\r\n"
FENCE = "```"
FENCES = ("", FENCE, FENCE + "json")  # what may stand before calls that are all of an answer
LONGEST = 512  # characters from where a call may begin up to its arguments: what is longer is text


class Delta(NamedTuple):
    """A piece of an answer.

    Attributes:
        kind: "thought"; "text"; "call" (one begins: its name), "arguments" (more of its arguments' JSON),
            "end" (of it).
        text: the piece.
        index: of the call, from 0 on.
    """

    kind: Literal["thought", "text", "call", "arguments", "end"]
    text: str = ""
    index: int = 0


class Parser:
    """Reads an answer as it comes: a thought, text and calls.

    ::

        parser = Parser(HERMES, ["weather"])
        deltas = [*parser.push("I'll see.\\n<tool_call>…"), *parser.finish()]

    Args:
        family: the form of calls; None: there are none.
        names: of the tools; what names no tool is text.
        parallel: whether a second call is one.
        thought: of `families.thought_of`.
    """

    def __init__(
        self, family: Family | None, names: Sequence[str] = (), parallel: bool = True, thought: str = ""
    ) -> None:
        self._answer = self._rest if family is None else self._head
        family = family or Family("none")
        self._parallel, self._tag = parallel, family.opening.strip()
        self._closes = "}" + _bare(family.closing)
        heads = [(name, f'{{"name":"{name}","{family.key}":{{') for name in names]
        begins = [begin + fence for begin in dict.fromkeys(("", family.begins)) for fence in FENCES]
        self._unmarked = {begin + head: name for begin in begins for name, head in heads}
        self._marked = {self._tag + head: name for name, head in heads}
        self._heads = self._unmarked
        self._state = {"may": self._begin, "begun": self._thought}.get(thought, self._answer)
        self._thinks = False  # whether a part of the thought was told
        self._held = ""  # not yet told: it may belong to a call
        self._call = -1  # index of the newest
        self._depth, self._in_text, self._escaped = 0, False, False

    def push(self, text: str) -> list[Delta]:
        """More of the answer; what is certain by now."""
        self._held += text
        found: list[Delta] = []
        while self._held and self._state(found):
            pass
        return found

    def finish(self) -> list[Delta]:
        """The end of the answer: what was held back is text, unless it stands in a call or behind one."""
        held, self._held = self._held, ""
        if self._state == self._tail:
            return [Delta("end", "", self._call)]
        if self._state in (self._arguments, self._next, self._behind):
            return []
        if self._state == self._thought:
            return [Delta("thought", held.rstrip(SPACE))] if held.strip(SPACE) else []
        return [Delta("text", held)] if held else []

    # Each state takes what it can of the held text, and says whether another one is to go on.

    def _begin(self, found: list[Delta]) -> bool:
        """The beginning of an answer, which may be a thought's."""
        bare = self._held.lstrip(SPACE)
        if len(self._held) < LONGEST and bare != OPEN and OPEN.startswith(bare):
            return False
        begins = bare.startswith(OPEN)
        self._held = bare[len(OPEN) :] if begins else self._held
        self._state = self._thought if begins else self._answer
        return True

    def _thought(self, found: list[Delta]) -> bool:
        """A thought up to its end, without the whitespace around it."""
        if not self._thinks:
            self._held = self._held.lstrip(SPACE)
        before, closes, behind = self._held.partition(CLOSE)
        if not closes:
            before = self._held[: len(self._held) - _begun(self._held, CLOSE)]
        told = before.rstrip(SPACE) if closes or len(before) < LONGEST else before
        if told:
            found.append(Delta("thought", told))
            self._thinks = True
        self._held = behind if closes else self._held[len(told) :]
        if closes:
            self._state = self._behind
        return bool(closes)

    def _behind(self, found: list[Delta]) -> bool:
        """Between a thought and the answer."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._answer
        return True

    def _rest(self, found: list[Delta]) -> bool:
        """No call can come any more."""
        found.append(Delta("text", self._held))
        self._held = ""
        return False

    def _text(self, found: list[Delta]) -> bool:
        """Text, where a tag may open a call; whitespace before it belongs to neither."""
        place = self._held.find(self._tag)
        if place < 0:
            place = len(self._held) - _begun(self._held, self._tag)
        whole, after = self._held[:place], self._held[place:]
        before = whole.rstrip(SPACE) if len(whole) < LONGEST else whole
        if before:
            found.append(Delta("text", before))
            self._held = self._held[len(before) :]
        if after.startswith(self._tag):
            self._heads, self._state = self._marked, self._head
            return True
        return False

    def _head(self, found: list[Delta]) -> bool:
        """What stands before a call's arguments."""
        bare = _bare(self._held[:LONGEST])
        for head, name in self._heads.items():
            if bare.startswith(head):
                self._call += 1
                found.append(Delta("call", name, self._call))
                self._held = _behind(self._held, len(head) - 1)
                self._state = self._arguments
                return True
        if len(self._held) < LONGEST and any(head.startswith(bare) for head in self._heads):
            return False
        if self._heads is self._unmarked:
            self._state = self._text if self._tag and self._call < 0 else self._rest
            return True
        at = self._held.index(self._tag) + len(self._tag)  # the tag opens nothing
        found.append(Delta("text", self._held[:at]))
        self._held, self._state = self._held[at:], self._text
        return True

    def _arguments(self, found: list[Delta]) -> bool:
        """The arguments, up to the brace that closes them."""
        at = 0
        for letter in self._held:
            at += 1
            if self._in_text:
                self._in_text = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self._state = self._tail
                    break
        found.append(Delta("arguments", self._held[:at], self._call))
        self._held = self._held[at:]
        return True

    def _tail(self, found: list[Delta]) -> bool:
        """What stands behind a call's arguments."""
        bare, closes = _bare(self._held[:LONGEST]), "}" if self._heads is self._unmarked else self._closes
        if closes.startswith(bare) and bare != closes and len(self._held) < LONGEST:
            return False
        found.append(Delta("end", "", self._call))
        self._state = self._next
        if bare.startswith(closes):
            self._held = _behind(self._held, len(closes))
        return True

    def _next(self, found: list[Delta]) -> bool:
        """Behind a call."""
        bare = self._heads is self._unmarked
        self._held = self._held.lstrip(SPACE + ";" * (bare and self._parallel))
        if bare and FENCE.startswith(self._held[: len(FENCE)]):
            whole = len(self._held) >= len(FENCE)
            self._held = self._held.removeprefix(FENCE)
            return whole
        if self._held:
            again = self._head if bare else self._text
            self._state = again if self._parallel else self._rest
        return True


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _bare(text: str) -> str:
    """A text without whitespace: names and tags hold none."""
    return re.sub(f"[{SPACE}]", "", text)


def _behind(text: str, count: int) -> str:
    """What stands behind so many characters that are no whitespace, and behind the whitespace there."""
    found = re.match(rf"(?:[{SPACE}]*[^{SPACE}]){{{count}}}[{SPACE}]*", text)
    return "" if found is None else text[found.end() :]
