"""How a family of models writes calls of tools, and the grammar that binds an answer to them.

All families write a call as ``{"name": NAME, KEY: {arguments}}``; they differ in the key, in what stands
around it, and in whether text may come before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.chat.tools import Tools

#: separators as templates write JSON, and no other whitespace: small models write it for ever
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Family:
    """A family's form of calls.

    Attributes:
        name: of the family.
        key: of the arguments.
        opening: what a call begins with, anywhere in an answer; "": calls begin an answer, or there are none.
        closing: what ends it.
        between: what stands between two calls.
        begins: a token that may stand before the first call of an answer, or "".
    """

    name: str
    key: str = "arguments"
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    begins: str = ""

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, names with arguments, as an answer has them."""
        return self.between.join(
            f"{self.opening}{self._head(name)}{json.dumps(arguments, ensure_ascii=False)}}}{self.closing}"
            for name, arguments in calls
        )

    def grammar(self, tools: Tools, special: Sequence[str] = (), schema: str | None = None) -> str:
        """The grammar of an answer, in llguidance's form of Lark.

        A forced answer is calls from the first token on; else an answer is free until a call begins, and is
        held to the calls from there.

        Args:
            special: the vocabulary's special tokens: a grammar names them, and text does not hold them.
            schema: JSON schema of an answer that calls nothing; None: any text.
        """
        names = [f"call_{i}" for i in range(len(tools.callable))]
        tag, rest = self.opening.strip(), self.opening[len(self.opening.rstrip()) :]
        begin = _spelt(self.opening, special)
        more = f"({_quoted(self.between)} {begin} call)*" if tools.parallel else ""
        token = f"{self.begins}?" if self.begins and self.begins in special else ""
        lines = ["%llguidance {}"]
        if tools.forced:
            lines.append(f"start: {begin} call {more}")
        elif schema is not None:
            lines += [f"start: answer | {token} {begin} call {more}", f"answer: {_json(json.loads(schema))}"]
        elif tag in special:
            lines += [f"start: TEXT | TEXT? {begin} call {more}", r"TEXT: /(.|\n)*/"]
        elif tag:
            lines += [f"start: TEXT | trigger {_quoted(rest)} call {more}", r"TEXT: /(.|\n)*/"]
            lines += [f"trigger[lazy]: TEXT {_quoted(tag)}"]
        else:  # all that is read as a call is one
            lines.append(f"start: TEXT | {token} call {more}")
            lines.append(r'TEXT: /(.|\n)*/ & ~/[ \t\r\n]*\{[ \t\r\n]*"name"(.|\n)*/')
        lines.append(f"call: ({' | '.join(names)}) {_spelt('}' + self.closing, special)}")
        for name, tool in zip(names, tools.callable, strict=True):
            head = _quoted(self._head(tool.name))
            if schema is not None:  # a word each, as schemas have them: a longer one would hide these
                words = ("{", '"name"', ": ", json.dumps(tool.name), ", ", json.dumps(self.key), ": ")
                head = " ".join(map(_quoted, words))
            lines.append(f"{name}: {head} {_json(tool.bound)}")
        return "\n".join(lines) + "\n"

    def _head(self, name: str) -> str:
        """What stands before the arguments of a call."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": SPACING}, ensure_ascii=False)


def _spelt(text: str, special: Sequence[str]) -> str:
    """A text that has to come, the special tokens in it as such."""
    parts = re.split(r"(<[^<>]*>)", text)
    return " ".join(part if part in special else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
