"""Answers in OpenAI's Harmony (gpt-oss): messages of several channels, read as they come into a
thought, text and calls, and the grammar that binds them to calls that are valid.

An answer is messages ``<|channel|>analysis<|message|>…<|end|><|start|>assistant`` one behind
another, the last one without what stands behind it. Of the channel "analysis" is what the model
thinks; what is "to=functions.NAME", behind the channel or before it, is a call; all else is text:
the channel "final", and what "commentary" says before a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from tokenswift.chat.argument_rules import json_rule
from tokenswift.chat.parser import Delta
from tokenswift.chat.tools import Tools
from tokenswift.chat.values import ValueScan
from tokenswift.grammar import Grammar
from tokenswift.json_schema import closed
from tokenswift.loader.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

#: what ends a message
ENDS = (END, CALL, RETURN)
THOUGHT = "analysis"
#: what an answer's own message begins with, behind `START`
ROLE = "assistant"
#: longest head of a message: role, channel, recipient and the type of its content
LONGEST_HEAD = 256
_HEAD = re.compile(
    rf"(?:{re.escape(START)})?(?:{ROLE})?(?: to=(?P<before>[^\s<>]+))?\s*"
    rf"(?:{re.escape(CHANNEL)}(?P<channel>[a-z]+)(?: to=(?P<behind>[^\s<>]+))?)?"
    rf"(?:\s*(?:{re.escape(CONSTRAIN)})?[a-z]+)?\s*{re.escape(MESSAGE)}"
)
_FUNCTION = "functions."


class _Head(NamedTuple):
    """What stands before a message: its channel, and the name of the function that it calls."""

    channel: str
    function: str


def _head_of(text: str) -> _Head | None:
    """The head that a text is; None: it is none."""
    match = _HEAD.fullmatch(text)
    if match is None:
        return None
    recipient = match["before"] or match["behind"] or ""
    name = recipient.removeprefix(_FUNCTION) if recipient.startswith(_FUNCTION) else ""
    return _Head(match["channel"] or "", name)


class HarmonyParser:
    """Reads an answer as it comes. Whatever the pieces are that it comes in, they make the same
    text and calls; a text without marks is text.

    Args:
        names: of the tools; a message to another function is text.
        parallel: whether a second call is one.
    """

    def __init__(self, names: Sequence[str] = (), parallel: bool = True) -> None:
        self._names = frozenset(names)
        self._parallel = parallel
        self._deltas: list[Delta] = []
        self._held = ""
        self._ended = False
        self._in_head = True
        self._head = _Head("", "")
        self._function = ""  # that the message calls, until its arguments begin
        self._scan: ValueScan | None = None  # of the arguments of a call that is open
        self._calls = 0
        self._kinds_with_text: set[str] = set()  # kinds of messages that said something
        self._apart: str | None = None  # the kind that is to be told from what it said before

    def push(self, text: str) -> list[Delta]:
        """More of the answer; what is certain by now."""
        self._held += text
        while self._advance():
            pass
        deltas = self._deltas
        self._deltas = []
        return deltas

    def finish(self) -> list[Delta]:
        """The end of the answer; a head that was begun is left out."""
        self._ended = True
        deltas = self.push("")
        if self._scan is not None:  # cut within its arguments
            self._scan = None
            self._calls += 1
        return deltas

    def _advance(self) -> bool:
        """Read one part of what is held; whether there may be another."""
        if not self._held:
            return False
        return self._read_head() if self._in_head else self._read_body()

    def _read_head(self) -> bool:
        before, mark, behind = self._held.partition(MESSAGE)
        head = _head_of(before + mark) if mark else None
        if head is not None:
            self._open(head)
            self._held = behind
            return True
        if self._may_become_head(before) and not mark:
            if self._ended:
                self._held = ""
            return False
        self._open(_Head("", ""))  # text without marks, or with others
        return True

    def _may_become_head(self, text: str) -> bool:
        begun = text.startswith((START, CHANNEL, " to=", ROLE + CHANNEL, ROLE + " to="))
        marks = (START, CHANNEL, MESSAGE, " to=", ROLE + CHANNEL, ROLE + " to=")
        return len(text) <= LONGEST_HEAD and (begun or any(mark.startswith(text) for mark in marks))

    def _open(self, head: _Head) -> None:
        self._in_head = False
        self._head = head
        is_call = head.function in self._names and (self._parallel or not self._calls)
        self._function = head.function if is_call else ""
        self._apart = self._kind if self._kind in self._kinds_with_text else None

    @property
    def _kind(self) -> Literal["thought", "text"]:
        return "thought" if self._head.channel == THOUGHT else "text"

    def _read_body(self) -> bool:
        if self._scan is not None:
            return self._read_arguments(self._scan)
        if self._function:
            return self._begin_call()
        ends = [at for mark in ENDS if (at := self._held.find(mark)) >= 0]
        cut = min(ends, default=len(self._held) - self._mark_begun())
        self._say(self._held[:cut])
        self._held = self._held[cut:]
        if not ends:
            if self._ended:
                self._say(self._held)
                self._held = ""
            return False
        self._close()
        return True

    def _begin_call(self) -> bool:
        """A call is one from the brace of its arguments on; without one its message is text."""
        letters = self._held.lstrip()
        if letters[:1] == "{":
            self._held = letters
            self._scan = ValueScan()
            self._deltas.append(Delta("call", self._function, self._calls))
        if letters or self._ended:
            self._function = ""
        return bool(letters)

    def _read_arguments(self, scan: ValueScan) -> bool:
        end = scan.end_in(self._held)
        text = self._held if end is None else self._held[:end]
        if text:
            self._deltas.append(Delta("arguments", text, self._calls))
        self._held = self._held[len(text) :]
        if end is None:
            return False
        self._deltas.append(Delta("end", "", self._calls))
        self._calls += 1
        self._scan = None
        self._held = self._held.lstrip()
        return bool(self._held)

    def _mark_begun(self) -> int:
        """Letters at the end of what is held that may become a mark."""
        if self._ended:
            return 0
        longest = max(map(len, ENDS))
        tails = range(min(longest, len(self._held)), 0, -1)
        held = self._held
        return next((n for n in tails if any(mark.startswith(held[-n:]) for mark in ENDS)), 0)

    def _close(self) -> None:
        """Leave out the mark that ends a message; the next one begins."""
        mark = next(mark for mark in ENDS if self._held.startswith(mark))
        self._held = self._held[len(mark) :]
        self._in_head = True

    def _say(self, text: str) -> None:
        if not text:
            return
        kind = self._kind
        if self._apart == kind:
            text = f"\n{text}"
            self._apart = None
        self._kinds_with_text.add(kind)
        self._deltas.append(Delta(kind, text))


# ---- the grammar of an answer --------------------------------------------------------------------


def harmony_grammar(
    tools: Tools | None, special: Collection[str], answer: Grammar | None = None
) -> Grammar | None:
    """The grammar of an answer, in llguidance's form of Lark: thoughts, then an answer or a call.

    Args:
        tools: what may be called; None: nothing.
        special: the special tokens of the vocabulary.
        answer: what the answer's text is held to; None: any text. A Lark grammar is left as it is:
            it is one of the whole answer.
    """
    if answer is not None and answer.kind == "lark":
        return answer
    if tools is None and answer is None:
        return None
    writer = _Writer(special)
    lines = ["%llguidance {}", f"start: before* ({' | '.join(_last(tools))})"]
    lines.append(f"before: {writer.message('(THOUGHT | SPOKEN)', 'TEXT?')} {writer.behind()}")
    lines.append(r"TEXT: /(.|\n)+/")
    lines.append(f'THOUGHT: "{THOUGHT}"')
    lines.append('SPOKEN: "commentary"')
    if tools is None or tools.choice == "auto":
        body = "TEXT?"
        if answer is not None and answer.kind == "regex":
            escaped = answer.text.replace("/", r"\/")
            body = f"/{escaped}/"
        elif answer is not None:
            schema = json.loads(answer.text)
            body = json_rule({} if schema is True else closed(schema))
        lines += [f"final: {writer.message('FINAL', 'said')}", f"said: {body}", 'FINAL: "final"']
    if tools is not None:
        lines += writer.calls(tools)
    return Grammar.lark("\n".join(lines) + "\n")


def _last(tools: Tools | None) -> list[str]:
    """Rules of an answer's last message."""
    if tools is None:
        return ["final"]
    return ["final", "call"] if tools.choice == "auto" else ["call"]


class _Writer:
    """Writes rules with the special tokens of a vocabulary."""

    def __init__(self, special: Collection[str]) -> None:
        self._special = special

    def mark(self, name: str) -> str:
        """A mark, a special token or text."""
        return name if name in self._special else json.dumps(name)

    def message(self, channel: str, body: str) -> str:
        """A message of a channel, without what ends it."""
        return f"{self.mark(CHANNEL)} {channel} {self.mark(MESSAGE)} {body}"

    def behind(self) -> str:
        """What stands between two messages."""
        return f'{self.mark(END)} {self.mark(START)} "{ROLE}"'

    def calls(self, tools: Tools) -> Iterable[str]:
        """Rules of a call, one for each tool."""
        names = tools.callable
        kind = f'(" "? {self.mark(CONSTRAIN)} "json" | " json")?'
        yield f"call: {' | '.join(f'call_{i}' for i in range(len(names)))}"
        for i, name in enumerate(names):
            to = json.dumps(f" to={_FUNCTION}{name}")
            channel = f'{self.mark(CHANNEL)} "commentary"'
            head = f"({to} {channel} | {channel} {to}) {kind} {self.mark(MESSAGE)}"
            yield f"call_{i}: {head} {json_rule(tools.bound(name))}"
