"""Families of models: how each writes calls of tools, the grammar that binds an answer to them, and which one
a model belongs to, by its chat template and its vocabulary.

All families write a call as ``{"name": NAME, KEY: {arguments}}``; they differ in the key, in what stands
around it, and in whether text may come before. An answer that is such JSON and nothing else, perhaps fenced
as code, is calls in every family: coder models write so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.chat.tools import Tools
from tokenswift.grammar import CLOSE, OPEN, closed

#: separators as templates write JSON, and no other whitespace: small models write it for ever
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: where a model writes calls of its own accord, it may indent them, but not for ever
INDENTED = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\r\n]{0,99}"}
_S = r"[ \t\r\n]*"
TAIL = 16  # tokens at a prompt's end, among which the mark of a thought is


@dataclass(frozen=True, slots=True)
class Family:
    """A family's form of calls.

    Attributes:
        name: of the family.
        key: of the arguments.
        opening: what a call begins with, anywhere in an answer; "": calls begin an answer.
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

    def begun(self, name: str, arguments: str) -> str:
        """A call up to the end of its arguments, which may be cut."""
        return f"{self.opening}{self._head(name)}{arguments}"

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
        token = f"{self.begins}?" if self.begins in special else ""
        lines = ["%llguidance {}"]
        if tools.forced:
            lines.append(f"start: {begin} call {more}")
        elif schema is not None:
            lines += [
                f"start: answer | {token} {begin} call {more}",
                f"answer: {_json(closed(json.loads(schema)))}",
            ]
        else:
            lines += [
                f"start: TEXT | {token} bare" + (f" | opened {_quoted(rest)} call {more}" if tag else "")
            ]
            lines += self._free(tools, special)
            if tag:
                lines += [f"opened: trigger{f' | TEXT? {tag}' if tag in special else ''}"]
                lines += [f"trigger[lazy]: TEXT {_quoted(tag)}"]
        if tag or tools.forced or schema is not None:
            lines.append(f"call: ({' | '.join(names)}) {_spelt('}' + self.closing, special)}")
            for name, tool in zip(names, tools.callable, strict=True):
                head = _quoted(self._head(tool.name))
                if schema is not None:  # a word each, as schemas have them: a longer one would hide these
                    words = ("{", '"name"', ": ", json.dumps(tool.name), ", ", json.dumps(self.key), ": ")
                    head = " ".join(map(_quoted, words))
                lines.append(f"{name}: {head} {_json(tool.bound)}")
        return "\n".join(lines) + "\n"

    def _free(self, tools: Tools, special: Sequence[str]) -> list[str]:
        """Rules of an answer that is calls without marks, perhaps indented or fenced as code, and of text,
        which is what does not begin as one up to its arguments."""
        begins = f"({re.escape(self.begins)})?" if self.begins not in special else ""
        before, behind = f"{begins}{_S}(```(json)?{_S})?", f',{_S}"{self.key}"{_S}:{_S}'
        call, known = rf'\{{{_S}"name"{_S}:{_S}', [tool.name for tool in tools.callable]
        first = " | ".join(f"FIRST_{i} bare_{i}" for i in range(len(known)))
        others = " | ".join(f"{_quoted(json.dumps(name))} KEY bare_{i}" for i, name in enumerate(known))
        lines = [
            f"bare: ({first}) CLOSE {'(MORE other CLOSE)*' if tools.parallel else ''} FENCE?",
            rf'TEXT: /(.|\n)*/ & ~/{before}{call}"({"|".join(known)})"{_S}{behind}\{{(.|\n)*/',
            rf"CLOSE: /{_S}\}}/",
            f"FENCE: /{_S}```/",
        ]
        if tools.parallel:
            lines += [f"MORE: /{_S}(;{_S})?{call}/", f"KEY: /{_S}{behind}/", f"other: {others}"]
        for i, tool in enumerate(tools.callable):
            lines.append(f'FIRST_{i}: /{before}{call}"{tool.name}"{_S}{behind}/')
            lines.append(f"bare_{i}: {_json(tool.bound, INDENTED)}")
        return lines

    def _head(self, name: str) -> str:
        """What stands before the arguments of a call."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '


def _json(schema: dict[str, Any], spacing: dict[str, Any] = SPACING) -> str:
    given = {**schema.get("x-guidance", {}), **spacing}
    return "%json " + json.dumps({**schema, "x-guidance": given}, ensure_ascii=False)


def _spelt(text: str, special: Sequence[str]) -> str:
    """A text that has to come, the special tokens in it as such."""
    parts = re.split(r"(<[^<>]*>)", text)
    return " ".join(part if part in special else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


#: Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, after text or not
HERMES = Family("hermes", opening="<tool_call>\n", closing="\n</tool_call>")
#: an answer that is ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``
LLAMA3 = Family("llama3", key="parameters", between="; ", begins="<|python_tag|>")
#: models of which nothing is known: an answer that is ``{"name": …, "arguments": {…}}``, a call a line
PLAIN = Family("plain")


def template_of(tokenizer: Any) -> str:
    """The template that a tokenizer has for chats with tools; "" where it has none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("tool_use") or found.get("default")
    return found if isinstance(found, str) else ""


def knows_tools(tokenizer: Any) -> bool:
    """Whether a chat template does anything with tools."""
    return "tools" in template_of(tokenizer)


def family_of(tokenizer: Any) -> Family:
    """The family whose form of calls a model's template speaks of; a plain one where it speaks of none."""
    template = template_of(tokenizer)
    if "tools" in template and HERMES.opening.strip() in template:
        return HERMES
    if "tools" in template and ("ipython" in template or LLAMA3.begins in template):
        return LLAMA3
    return PLAIN


def effort_options(effort: str | None, tokenizer: Any) -> dict[str, Any]:
    """How much a model is to think, in the variables that its chat template knows."""
    template = template_of(tokenizer)
    found: dict[str, Any] = {}
    if effort is not None and "reasoning_effort" in template:
        found["reasoning_effort"] = effort
    if effort == "none" and "enable_thinking" in template:
        found["enable_thinking"] = False
    return found


def thought_of(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Where the thought of an answer begins: "may" (the answer may begin with one), "begun" (the prompt has),
    "" (there is none).

    Args:
        prompt: ids of a chat.
    """
    if CLOSE not in template_of(tokenizer):
        return ""
    end = tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip()
    return "begun" if end.endswith(OPEN) else "" if end.endswith(CLOSE) else "may"
