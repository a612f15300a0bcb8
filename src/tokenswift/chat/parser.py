"""Answers, read as they come into a thought, text and calls.

A call is a call as a whole, or it is text: an object of a tool's name and its arguments, perhaps
with an id and a type, and nothing else. Calls behind a family's marks, and those that an answer
begins with exactly as the family writes them, are held to that by a grammar (`answer_grammar`), so
that their arguments are told as they come. Others, such as fenced ones, are told when they end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from tokenswift.chat.values import LONGEST, SPACE, ValueReader, ValueScan, Waits, WrittenCall
from tokenswift.grammar import CLOSE, OPEN
from tokenswift.loader.call_forms import ID, NAME, PLAIN, Family

if TYPE_CHECKING:
    from regex import Match

#: whitespace between the parts of a call
SPACES = f"[{SPACE}]{{0,{LONGEST}}}+"
OPENED = SPACES + OPEN
CLOSED = SPACES + CLOSE
FENCE = SPACES + "```"
CLOSING_BRACE = SPACES + r"\}"
#: parts of a call's form: special tokens, quoted words, JSON's own letters, others
PARTS = re.compile(rf'"[^"]*"|<[^<>{SPACE}]+>|[{{}}\[\]:,]|[^{SPACE}{{}}\[\]:,"<]+|[^{SPACE}]')
ID_PATTERN = "[A-Za-z0-9_-]{1,64}"


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


class Patterns:
    """Regular expressions of a family's calls; whitespace may be other than it writes.

    Args:
        family: the form of calls.
        names: of the tools.

    Attributes:
        exact: a call at the beginning of an answer, up to its arguments, to the letter.
        before: what may stand before other calls at the beginning.
        mark: what calls begin with anywhere; "": there is no mark.
        first: the same, up to the first call's arguments.
        more: what stands between two calls behind one mark, up to the second one's arguments.
        tail: what stands behind arguments.
        closing: what ends calls behind a mark.
    """

    def __init__(self, family: Family, names: Sequence[str]) -> None:
        self._family = family
        self._names = "|".join(map(re.escape, names))
        begins = f"({re.escape(family.begins)})?" if family.begins else ""
        bare = re.escape(PLAIN.head.replace(PLAIN.key, family.key))
        named = f"(?P<name>{self._names})"
        self.exact = f"{begins}{bare.replace(NAME, named)}(?=\\{{)"
        opened = rf"{SPACES}{begins}{SPACES}(?P<fence>```(json)?)?{SPACES}"
        self.before = rf"{opened}(?P<twice>\{{(?=\{{))?(?=\[|\{{[^{{])"
        self.mark = SPACES + re.escape(family.mark) if family.mark else ""
        object_follows = f"{SPACES}(?=\\{{)" if family.arguments == "json" else ""
        head = f"{self._flexible(family.head)}{object_follows}"
        self.first = f"{self._flexible(family.opening)}{head}"
        self.more = f"{self._flexible(family.between)}{head}" if family.shared else ""
        self.tail = self._flexible(family.tail)
        self.closing = self._flexible(family.closing)
        if not family.shared:
            self.tail += self.closing
            self.closing = ""

    def _flexible(self, text: str) -> str:
        """A pattern of a part of a call."""
        before, marked, behind = text.partition(ID)
        if marked:
            opening = self._flexible(self._family.id_opening)
            closing = self._flexible(self._family.id_closing)
            key = f"({opening}{ID_PATTERN}{closing})?"
            return f"{self._flexible(before)}{key}{self._flexible(behind)}"
        named = f"(?P<name>{self._names})"
        parts = (re.escape(part).replace(NAME, named, 1) for part in PARTS.findall(text))
        return "".join(SPACES + part for part in parts)


class Parser(ValueReader):
    """Reads an answer as it comes: a thought, text and calls. Whatever the pieces are that it comes
    in, they make the same text and calls.

    ::

        parser = Parser(HERMES, ["weather"])
        deltas = [*parser.push("I'll see.\\n<tool_call>…"), *parser.finish()]

    Args:
        family: the form of calls; None: there are none.
        names: of the tools; what names no tool is text.
        parallel: whether a second call is one.
        thought: where it begins, as `thought_of` has it.
    """

    def __init__(
        self,
        family: Family | None,
        names: Sequence[str] = (),
        parallel: bool = True,
        thought: str = "",
    ) -> None:
        super().__init__(names)
        self._deltas: list[Delta] = []
        self._parallel = parallel
        self._count = 0  # calls so far
        self._spoken = False  # whether there is text before the newest call
        self._apart = False  # whether the next text is to be told from that text
        self._reader = self._answer(family, thought)

    def push(self, text: str) -> list[Delta]:
        """More of the answer; what is certain by now."""
        self._held += text
        next(self._reader, None)
        deltas = self._deltas
        self._deltas = []
        return deltas

    def finish(self) -> list[Delta]:
        """The end of the answer: what was held back is text, unless it stands in a call or behind
        one."""
        self._ended = True
        return self.push("")

    # ---- the parts of an answer ------------------------------------------------------------------

    def _answer(self, family: Family | None, thought: str) -> Waits[None]:
        thinks = None if family is None else family.thinks
        if thought:
            begun = thought == "begun" or (yield from self._take(OPENED)) is not None
            yield from self._strip(SPACE)
            if begun:
                yield from self._thought(CLOSED)
        elif thinks is not None and (yield from self._take(SPACES + re.escape(thinks[0]))):
            yield from self._strip(SPACE)
            yield from self._thought(SPACES + re.escape(thinks[1]))
        if family is not None:
            yield from self._spoken_part(family)
            if self._names:
                yield from self._calls(Patterns(family, self._names))
        yield from self._tell("text")

    def _thought(self, closing: str) -> Waits[None]:
        yield from self._tell("thought", closing)
        yield from self._take(closing)
        yield from self._strip(SPACE)

    def _spoken_part(self, family: Family) -> Waits[None]:
        """Text between the marks of an answer's text, where the family has such."""
        if family.speaks is None:
            return
        opening, closing = map(re.escape, family.speaks)
        if (yield from self._take(SPACES + opening)):
            yield from self._tell("text", closing)
            yield from self._take(closing)

    def _calls(self, patterns: Patterns) -> Waits[None]:
        """Text and calls, as long as a call may come."""
        yield from self._bare_calls(patterns)
        if self._count or not patterns.mark:
            return
        while self._may_call and (yield from self._tell("text", patterns.mark)):
            match = yield from self._take(patterns.first)
            if match is None:  # the mark opens nothing
                opened = yield from self._take(patterns.mark)
                if opened is not None:
                    self._say("text", opened[0])
            while match is not None:
                name = match["name"]
                yield from self._call(name, patterns.tail, self._arguments(name))
                match = None
                if patterns.more and self._may_call:
                    match = yield from self._take(patterns.more)
                if match is None:
                    yield from self._closing(patterns.closing)

    def _closing(self, closing: str) -> Waits[None]:
        """What ends calls behind a mark, or the beginning of it at the answer's end."""
        if (yield from self._take(closing)) is None and self._ended:
            match = self._match(closing, partial=True)
            if match is not None and match.end() == len(self._held):
                self._held = ""
        yield from self._strip(SPACE)

    @property
    def _may_call(self) -> bool:
        return self._parallel or not self._count

    def _bare_calls(self, patterns: Patterns) -> Waits[None]:
        """Calls that an answer begins with."""
        exact = patterns.exact
        while self._may_call and (match := (yield from self._take(exact))) is not None:
            tail = SPACES + r"\}" + SPACES
            yield from self._call(match["name"], tail, self._object_arguments())
            yield from self._strip(SPACE + ";")
            exact = SPACES + patterns.exact
        fence = ""  # that is open
        while self._may_call:
            match = yield from self._seen(patterns.before)
            calls = None if match is None else (yield from self._value_of_calls(match.end()))
            if calls is None:
                break
            for call in calls[: None if self._parallel else 1]:
                self._tell_call(call)
            fence = (match and match["fence"]) or fence
            self._held = self._held[calls[-1].end :]
            if match and match["twice"]:
                yield from self._closing_braces()
            if (yield from self._take(FENCE)) is not None:
                fence = ""
            yield from self._strip(SPACE + ";,")
        if fence and self._held:  # it holds text, too
            self._held = f"{fence}\n{self._held}"

    def _closing_braces(self) -> Waits[None]:
        """What stands behind a call within double braces, as the template of Qwen2.5-Coder shows
        calls to the model: it closes one brace, or two."""
        for _ in range(2):
            yield from self._take(CLOSING_BRACE)

    def _tell_call(self, call: WrittenCall) -> None:
        self._begin_call(call.name)
        self._say("arguments", call.arguments)
        if call.complete:
            self._end_call()
        else:
            self._count += 1

    # ---- a call whose arguments are told as they come --------------------------------------------

    def _begin_call(self, name: str) -> None:
        self._apart = self._spoken
        self._deltas.append(Delta("call", name, self._count))

    def _end_call(self) -> None:
        self._deltas.append(Delta("end", "", self._count))
        self._count += 1

    def _call(self, name: str, tail: str, arguments: Waits[bool]) -> Waits[None]:
        """A call, and what stands behind it.

        Args:
            arguments: reads them; whether they come to their end.
        """
        self._begin_call(name)
        if not (yield from arguments):
            self._count += 1
            return
        if (yield from self._take(tail)) is None and self._ended:
            self._held = ""  # a part of it
        self._end_call()

    def _arguments(self, name: str) -> Waits[bool]:
        """The arguments of a call of a tool, as the family writes them."""
        return self._object_arguments()

    def _object_arguments(self) -> Waits[bool]:
        """Arguments up to the brace that closes them."""
        scan = ValueScan()
        end: int | None = None
        while end is None and (self._held or not self._ended):
            end = scan.end_in(self._held)
            self._say("arguments", self._held[:end])
            self._held = "" if end is None else self._held[end:]
            if end is None:
                yield
        return end is not None

    def _say(self, kind: Literal["thought", "text", "arguments"], text: str) -> None:
        if not text:
            return
        if kind == "text":
            if self._apart:
                text = f"\n{text}"
            self._spoken = True
            self._apart = False
        self._deltas.append(Delta(kind, text, self._count if kind == "arguments" else 0))

    # ---- patterns in what comes ------------------------------------------------------------------

    def _match(self, pattern: str, partial: bool = False) -> Match[str] | None:
        """A pattern at the beginning of what is held, or its beginning where more may come, or
        where ``partial`` is set."""
        import regex  # which takes longer to import than all of this package

        return regex.match(pattern, self._held, partial=partial or not self._ended)

    def _search(self, pattern: str) -> Match[str] | None:
        """A pattern anywhere in what is held, or its beginning where more may come."""
        import regex

        return regex.search(pattern, self._held, partial=not self._ended)

    def _seen(self, pattern: str) -> Waits[Match[str] | None]:
        """What comes next of a pattern; None where something else does."""
        match = self._match(pattern)
        while match is not None and match.partial:
            yield
            match = self._match(pattern)
        return match

    def _take(self, pattern: str) -> Waits[Match[str] | None]:
        """What comes next of a pattern, which goes; None where something else does."""
        match = yield from self._seen(pattern)
        self._held = self._held[match.end() if match else 0 :]
        return match

    def _tell(self, kind: Literal["thought", "text"], mark: str | None = None) -> Waits[bool]:
        """Tell what stands before a mark, as it comes; whether the mark does."""
        while True:
            match = None if mark is None else self._search(mark)
            has_mark = match is not None and not match.partial
            text = self._held if match is None else self._held[: match.start()]
            self._held = self._held[len(text) :]
            text = text.rstrip(SPACE) if self._ended and kind == "thought" else text
            self._say(kind, text)
            if has_mark or self._ended:
                return has_mark
            yield

    def _strip(self, letters: str) -> Waits[None]:
        """Leave out letters that come next."""
        self._held = self._held.lstrip(letters)
        while not self._held and not self._ended:
            yield
            self._held = self._held.lstrip(letters)
