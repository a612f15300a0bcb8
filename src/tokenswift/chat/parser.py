"""Thoughts and calls of tools in an answer, read as it comes.

What is read is text of any origin: it is a call only where it names a tool, and its arguments are passed on
as they are written. Whatever the pieces are that an answer comes in, they make the same text and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import regex

from tokenswift.chat.tools import Family
from tokenswift.grammar import CLOSE, OPEN

SPACE = " \t\r\n"
S = f"[{SPACE}]*"
FENCE = "```"
LONGEST = 512  # characters from where a call may begin up to its arguments: what is longer is text
OPENED, CLOSED = regex.compile(S + OPEN), regex.compile(S + CLOSE + S)


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
        thought: of `tools.thought_of`.
    """

    def __init__(
        self, family: Family | None, names: Sequence[str] = (), parallel: bool = True, thought: str = ""
    ) -> None:
        self._answer = self._rest if family is None else self._head
        family = family or Family("none")
        self._parallel, self._tag = parallel, regex.escape(family.opening.strip())
        name, known = rf'{S}\{{{S}"name"{S}:{S}', "|".join(map(regex.escape, names))
        head = rf'{name}"(?P<name>{known})"{S},{S}"{family.key}"{S}:{S}(?=\{{)'
        begins = rf"{S}({regex.escape(family.begins)})?{S}({FENCE}(json)?)?"
        self._bare = True  # whether calls stand without marks, as an answer's first one may
        self._heads = {True: regex.compile(begins + head), False: regex.compile(S + self._tag + head)}
        ends = rf"{S}\}}{S}"
        self._ends = {True: regex.compile(ends), False: regex.compile(ends + family.closing.strip())}
        self._mark: Any = regex.compile(S + self._tag)
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
        if self._state in (self._arguments, self._next):
            return []
        if self._state == self._thought:
            return [Delta("thought", held.rstrip(SPACE))] if held.strip(SPACE) else []
        held = held.lstrip(SPACE) if self._state == self._begin else held
        return [Delta("text", held)] if held else []

    def _look(self, pattern: Any) -> Any:
        """What stands at the beginning of the held text: a match, None for anything else, False as long as it
        may still become one."""
        found = pattern.match(self._held, partial=True)
        if found and found.partial:
            return False if len(self._held) < LONGEST else None
        return found

    def _tell(self, kind: Literal["thought", "text"], mark: Any, found: list[Delta]) -> Any:
        """Tell what stands before a mark; None as long as it has not come."""
        place = mark.search(self._held, partial=True)
        at = len(self._held) if place is None else place.start()
        if place and place.partial and len(self._held) - at >= LONGEST:
            at = len(self._held)
        if at:
            found.append(Delta(kind, self._held[:at]))
            self._held = self._held[at:]
        return None if place is None or place.partial else place

    # Each state takes what it can of the held text, and says whether another one is to go on.

    def _begin(self, found: list[Delta]) -> bool:
        """The beginning of an answer, or what stands behind a thought."""
        opened = self._look(OPENED)
        if opened is False:
            return False
        self._held = self._held[opened.end() :] if opened else self._held.lstrip(SPACE)
        self._state = self._thought if opened else self._answer
        return True

    def _thought(self, found: list[Delta]) -> bool:
        """A thought up to its end, without the whitespace around it."""
        if not self._thinks:
            self._held = self._held.lstrip(SPACE)
        closed = self._tell("thought", CLOSED, found)
        self._thinks |= bool(found)
        if closed:
            self._held, self._state = CLOSED.sub("", self._held, 1), self._begin
        return bool(closed)

    def _rest(self, found: list[Delta]) -> bool:
        """No call can come any more."""
        found.append(Delta("text", self._held))
        self._held = ""
        return False

    def _text(self, found: list[Delta]) -> bool:
        """Text, where a tag may open a call; whitespace before it belongs to neither."""
        if not self._tell("text", self._mark, found):
            return False
        self._bare, self._state = False, self._head
        return True

    def _head(self, found: list[Delta]) -> bool:
        """What stands before a call's arguments."""
        head = self._look(self._heads[self._bare])
        if head is False:
            return False
        if head:
            self._call += 1
            found.append(Delta("call", head["name"], self._call))
            self._held, self._state = self._held[head.end() :], self._arguments
        elif self._bare:
            self._state = self._text if self._tag and self._call < 0 else self._rest
        else:  # the tag opens nothing
            at = self._mark.match(self._held).end()
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
        end = self._look(self._ends[self._bare])
        if end is False:
            return False
        found.append(Delta("end", "", self._call))
        self._held, self._state = self._held[end.end() if end else 0 :], self._next
        return True

    def _next(self, found: list[Delta]) -> bool:
        """Behind a call."""
        self._held = self._held.lstrip(SPACE + ";" * (self._bare and self._parallel))
        if self._bare and FENCE.startswith(self._held[: len(FENCE)]):
            whole = len(self._held) >= len(FENCE)
            self._held = self._held.removeprefix(FENCE)
            return whole
        if self._held:
            again = self._head if self._bare else self._text
            self._state = again if self._parallel else self._rest
        return True
