"""The grammar that binds an answer to calls that are valid, in the form of a model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from tokenswift.chat.argument_rules import ArgumentRules, json_rule
from tokenswift.chat.tools import Tools
from tokenswift.json_schema import closed
from tokenswift.loader.call_forms import ID, NAME, PLAIN, Family

NAMED = re.compile(r"<[^<>\s]+>")  # special tokens that llguidance takes by name
IDS = "/[A-Za-z0-9]{1,16}/"
WORDS = re.compile(r'"[^"]*"|\{|: |, |[^"{:,]+|.')


def answer_grammar(
    family: Family, tools: Tools, special: Mapping[str, int], schema: str | None = None
) -> str:
    """The grammar of an answer, in llguidance's form of Lark.

    A forced answer is calls from the first token on; else an answer is free until a call begins as
    the family writes it, and is held to the calls from there.

    Args:
        special: the vocabulary's special tokens with their ids: a grammar names them, and text does
            not hold them.
        schema: JSON schema of an answer that calls nothing; None: any text.
    """
    return _Writer(family, tools, special, schema).written()


class _Writer:
    def __init__(
        self, family: Family, tools: Tools, special: Mapping[str, int], schema: str | None
    ) -> None:
        self._family = family
        self._tools = tools
        self._special = special
        self._schema = schema

    def written(self) -> str:
        """The grammar."""
        lines = ["%llguidance {}"]
        begin = self._spelt(self._family.opening)
        token = f"{self._family.begins}?" if self._family.begins in self._special else ""
        if self._tools.choice != "auto":  # a call from the first token on
            lines.append(f"start: {begin} {self._calls()}")
        elif self._schema is not None:
            answer = json_rule(closed(json.loads(self._schema)))
            lines += [f"start: answer | {token} {begin} {self._calls()}", f"answer: {answer}"]
        else:
            lines += self._free(token)
        return "\n".join([*lines, *self._rules("one", self._family.head)]) + "\n"

    def _calls(self) -> str:
        """Calls behind the first opening."""
        family = self._family
        between = _quoted(family.between)
        if family.shared:
            one = f"one {self._spelt(family.tail)}"
            more = f" ({between} {one})*" if self._tools.parallel else ""
            return f"{one}{more} {self._spelt(family.closing)}"
        one = f"one {self._spelt(family.tail + family.closing)}"
        begin = self._spelt(family.opening)
        return f"{one} ({between} {begin} {one})*" if self._tools.parallel else one

    def _free(self, token: str) -> list[str]:
        """Rules of an answer that may be text, bare calls, or text and then marked calls."""
        family = self._family
        tools = self._tools
        head = PLAIN.head.replace(PLAIN.key, family.key)
        is_same_head = head == family.head
        rule = "one" if is_same_head else "bare"
        bare = f'{rule} "}}"'
        if tools.parallel:
            is_same = is_same_head and not family.shared
            separator = family.between if is_same else PLAIN.between
            bare = f"{bare} ({_quoted(separator)} {bare})*"
        begun = "|".join(re.escape(_named(head, name)) for name in tools.callable)
        passing = [self._spelt(mark) for mark in family.passing if mark in self._special]
        marked_text = f" (({'|'.join(passing)}) REST?)*" if passing else ""
        opened = " | opened" if family.mark else ""
        lines = [
            f"start: TEXT{marked_text} | {token} {bare}{opened}",
            rf"TEXT: /(.|\n)*/ & ~/({begun})(.|\n)*/",
        ]
        if passing:
            lines.append(r"REST: /(.|\n)+/")
        if not is_same_head:
            lines += self._rules("bare", head)
        if family.mark:
            lines += self._opened(marked_text)
        return lines

    def _opened(self, marked_text: str) -> list[str]:
        """Rules of text with a mark behind it, and of the calls that follow.

        Args:
            marked_text: what may follow text before that: marks of the family, and text.
        """
        family = self._family
        behind = family.opening.removeprefix(family.mark)
        space = '" "? ' if behind.startswith("[") else ""
        calls = f"{space}{_quoted(behind)} {self._calls()}"
        lines = [f"trigger[lazy]: TEXT {_quoted(family.mark)}"]
        if family.mark not in self._special:
            return [f"opened: trigger {calls}", *lines]
        marked = f"TEXT?{marked_text} {self._spelt(family.mark)}"
        return [f"opened: (trigger | {marked}) {calls}", *lines]

    def _rules(self, rule: str, head: str) -> Iterable[str]:
        """A rule of a call up to its arguments' end, and one for each tool."""
        names = self._tools.callable
        yield f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(names)))}"
        for i, name in enumerate(names):
            begin = self._head(_named(head, name))
            schema = self._tools.bound(name)
            if head == self._family.head and self._family.arguments != "json":
                arguments = ArgumentRules(f"{rule}_{i}_", self._family.arguments)
                yield f"{rule}_{i}: {begin} {arguments.written(schema)}"
                yield from arguments.rules
            else:
                yield f"{rule}_{i}: {begin} {json_rule(schema)}"

    def _head(self, head: str) -> str:
        if self._schema is not None and ID not in head and NAMED.search(head) is None:
            # a longer literal would hide the words of the schema, which are tokens of a lexer
            return " ".join(map(_quoted, WORDS.findall(head)))
        return self._spelt(head)

    def _spelt(self, text: str) -> str:
        """A text that has to come: special tokens in it as such, an id where there may be one."""
        before, marked, behind = text.partition(ID)
        if marked:
            opening = self._spelt(self._family.id_opening)
            closing = self._spelt(self._family.id_closing)
            return f"{self._spelt(before)} ({opening} {IDS} {closing})? {self._spelt(behind)}"
        if not self._special:
            return _quoted(text)
        names = sorted(self._special, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: str) -> str:
        if part not in self._special:
            return _quoted(part)
        return part if NAMED.fullmatch(part) else f"<[{self._special[part]}]>"


def _named(head: str, name: str) -> str:
    return head.replace(NAME, name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
