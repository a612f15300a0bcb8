"""Parsers of answers whose calls have arguments as XML or as Python writes them: they come out as
JSON, texts as they come, by the types that a tool's schema names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tokenswift.chat.parameters import TYPES, converted, parameters_of
from tokenswift.chat.parser import SPACES, Parser
from tokenswift.chat.python_values import PythonScan
from tokenswift.chat.values import LONGEST, SPACE, Waits
from tokenswift.loader.call_arguments import Form
from tokenswift.loader.call_forms import Family

STRING = frozenset(("string",))
XML_END = "</parameter>"
XML_CLOSING = f"\n?{XML_END}"
XML_TAIL = f"{SPACES}</function>"
PYTHON_KEY = rf"[^\W\d][\w.-]{{0,{LONGEST}}}+"


class ArgumentParser(Parser):
    """Reads an answer whose arguments are no JSON.

    Args:
        family: the form of calls.
        schemas: of the tools' arguments, by name.
        parallel, thought: as `Parser` has them.
    """

    def __init__(
        self,
        family: Family,
        schemas: Mapping[str, Mapping[str, object]],
        parallel: bool = True,
        thought: str = "",
    ) -> None:
        super().__init__(family, [*schemas], parallel, thought)
        self._schemas = schemas

    def _say_key(self, key: str, is_first: bool) -> None:
        text = json.dumps(key, ensure_ascii=False)
        self._say("arguments", f"{'{' if is_first else ', '}{text}: ")

    def _close(self, is_empty: bool) -> None:
        self._say("arguments", "{}" if is_empty else "}")


class XmlParser(ArgumentParser):
    """Reads calls whose arguments stand in tags of their own."""

    def _arguments(self, name: str) -> Waits[bool]:
        types = {one.name: one.types for one in parameters_of(self._schemas[name])}
        listed = sorted(types, key=len, reverse=True)
        keys = "|".join([*map(re.escape, listed), rf"[^<>\n]{{1,{LONGEST}}}"])
        opening = f"{SPACES}<parameter=(?P<key>{keys})>"
        is_first = True
        while (match := (yield from self._take(opening))) is not None:
            self._say_key(match["key"], is_first)
            is_first = False
            if not (yield from self._value(types.get(match["key"], TYPES))):
                return False
        if (yield from self._seen(XML_TAIL)) is None and self._is_cut("</function>", "<parameter="):
            self._held = ""
            return False
        self._close(is_first)
        return True

    def _is_cut(self, *marks: str) -> bool:
        """Whether the answer ends where a mark might have come."""
        left = self._held.lstrip(SPACE)
        has_begun = any(mark.startswith(left) or left.startswith(mark) for mark in marks)
        return self._ended and has_begun

    def _value(self, types: frozenset[str]) -> Waits[bool]:
        """A value, up to behind its end; whether it comes to it."""
        if (yield from self._letter(0)) == "\n":
            self._held = self._held[1:]
        if types == STRING:
            return (yield from self._text())
        import regex

        scanned = 0
        while True:
            match = regex.search(XML_CLOSING, self._held, pos=scanned)
            if match is not None:
                self._say("arguments", converted(self._held[: match.start()], types))
                self._held = self._held[match.end() :]
                return True
            if self._ended:
                self._say("arguments", self._before_closing().strip(SPACE))
                self._held = ""
                return False
            scanned = max(0, len(self._held) - len(XML_END))
            yield

    def _text(self) -> Waits[bool]:
        """A text, told as it comes."""
        self._say("arguments", '"')
        while True:
            match = self._search(XML_CLOSING)
            has_end = match is not None and not match.partial
            text = self._before_closing() if match is None else self._held[: match.start()]
            self._held = self._held[match.end() if match and has_end else len(text) :]
            self._say("arguments", json.dumps(text, ensure_ascii=False)[1:-1])
            if has_end:
                self._say("arguments", '"')
                return True
            if self._ended:
                self._held = ""
                return False
            yield

    def _before_closing(self) -> str:
        """What is held but for the beginning of what closes a value."""
        import regex

        match = regex.search(XML_CLOSING, self._held, partial=True)
        return self._held if match is None else self._held[: match.start()]


class PythonParser(ArgumentParser):
    """Reads calls as Python writes them; arguments without a key have those of the schema."""

    def _arguments(self, name: str) -> Waits[bool]:
        names = [one.name for one in parameters_of(self._schemas[name])]
        listed = sorted(names, key=len, reverse=True)
        keys = "|".join([*map(re.escape, listed), PYTHON_KEY])
        keyed = f"{SPACES}(?P<key>{keys}){SPACES}=(?!=)"
        count = 0
        while (yield from self._next_argument()):
            match = yield from self._take(keyed)
            if match is None and count >= len(names):
                break  # it cannot be an argument
            self._say_key(names[count] if match is None else match["key"], not count)
            count += 1
            if not (yield from self._value()):
                return False
            if (yield from self._take(f"{SPACES},")) is None:
                break
        if self._ended and not self._held.strip(SPACE):
            return False
        self._close(not count)
        return True

    def _next_argument(self) -> Waits[bool]:
        """Whether there is one more."""
        at = yield from self._behind_space(0)
        return (yield from self._letter(at)) not in (")", "")

    def _value(self) -> Waits[bool]:
        """A value, up to behind its end; whether it comes to it."""
        yield from self._strip(SPACE)
        scan = PythonScan()
        is_empty = True
        while self._held or not self._ended:
            text, end = scan.read(self._held)
            is_empty = is_empty and not text
            self._say("arguments", text)
            self._held = "" if end is None else self._held[end:]
            if end is not None:
                self._say("arguments", "null" if is_empty else "")
                return True
            yield
        return False


PARSERS: dict[Form, type[ArgumentParser]] = {"xml": XmlParser, "python": PythonParser}
