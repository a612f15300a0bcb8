"""Calls written as JSON without marks: whether a value that comes is calls and nothing else."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

SPACE = " \t\r\n"
# characters that whitespace between two parts of a call may have, and its keys and names: what is
# longer is text
LONGEST = 99
NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "tool_call_id", "type")

T = TypeVar("T")
Waits: TypeAlias = Generator[None, None, T]  # each yield waits for more of the text


class CutValue(Exception):
    """The answer ended within a value."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call in an answer.

    Attributes:
        name: of the tool.
        arguments: JSON, as it was written.
        end: the place behind the call.
        complete: whether it was not cut.
    """

    name: str
    arguments: str
    end: int
    complete: bool = True


class ValueReader:
    """Reads JSON from text that comes in pieces.

    Args:
        names: of the tools.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._held = ""  # not yet told: it may belong to a call
        self._ended = False
        self._cut = False  # whether the answer ends in a value

    def _value_of_calls(self, at: int) -> Waits[list[WrittenCall] | None]:
        """The calls that the value at a place consists of, or begins with where the answer ends
        in it; None: it is something else."""
        letter = yield from self._letter(at)
        if letter == "{":
            call = yield from self._object(at)
            return None if call is None else [call]
        calls: list[WrittenCall] = []
        while letter == "[" or letter == ",":
            at = yield from self._behind_space(at + 1)
            call = yield from self._object(at)
            if call is None and not self._cut:
                return None
            if call is not None:
                calls.append(call)
            at = len(self._held) if call is None else (yield from self._behind_space(call.end))
            letter = yield from self._letter(at)
        if not calls or letter not in ("]", ""):
            return None
        calls[-1] = replace(calls[-1], end=at + len(letter))
        return calls

    def _object(self, at: int) -> Waits[WrittenCall | None]:
        """The call at a place; None: there is something else."""
        if (yield from self._letter(at)) != "{":
            return None
        fields: dict[str, str] = {}
        letter = ""
        while letter != "}":
            try:
                at = yield from self._field(at + 1, fields)
                at = yield from self._behind_space(at)
                letter = yield from self._letter(at)
            except CutValue:
                letter = ""
            if not letter:
                self._cut = True
                return self._of_fields(fields, len(self._held), False)
            if letter not in ",}" or not self._may_be_call(fields):
                return None
        return self._of_fields(fields, at + 1, True)

    def _field(self, at: int, fields: dict[str, str]) -> Waits[int]:
        """Read a member of an object; the place behind it. What is none, or stands twice, gets a
        key that no call has.

        Raises:
            CutValue: the answer ends in it.
        """
        at = yield from self._behind_space(at)
        end = yield from self._whole_value(at, LONGEST)
        key = _text(self._held[at:end])
        at = yield from self._behind_space(end)
        colon = yield from self._letter(at)
        if key is None or key in fields or colon not in (":", ""):
            fields["?"] = ""
            return at
        if key not in (*NAME_KEYS, *ARGUMENT_KEYS, *OTHER_KEYS):
            fields["?"] = ""
            return at + 1
        start = yield from self._behind_space(at + 1)
        if key in ARGUMENT_KEYS and (yield from self._letter(start)) not in ("{", '"'):
            fields["?"] = ""
            return start
        most = None if key in ARGUMENT_KEYS else LONGEST
        end = yield from self._value_end(start, most)
        fields[key] = self._held[start:end]
        if end is None:
            raise CutValue
        return end

    def _may_be_call(self, fields: dict[str, str]) -> bool:
        names = [_text(fields[key]) for key in NAME_KEYS if key in fields]
        return "?" not in fields and all(name in self._names for name in names)

    def _of_fields(self, fields: dict[str, str], end: int, complete: bool) -> WrittenCall | None:
        """The call of an object's members."""
        names = [_text(fields[key]) for key in NAME_KEYS if key in fields]
        values = [fields[key] for key in ARGUMENT_KEYS if key in fields]
        if len(names) != 1 or len(values) != 1 or not self._may_be_call(fields):
            return None
        arguments = values[0]
        if arguments.startswith('"'):  # an object in a text
            arguments = _text(arguments) or ""
        if not arguments.startswith("{") or names[0] is None:
            return None
        return WrittenCall(names[0], arguments, end, complete)

    # ---- letters ---------------------------------------------------------------------------------

    def _letter(self, at: int) -> Waits[str]:
        """The letter at a place, once it has come; "" at the end of the answer."""
        while at >= len(self._held) and not self._ended:
            yield
        return self._held[at : at + 1]

    def _behind_space(self, at: int) -> Waits[int]:
        """The place behind whitespace, or in it where there is too much."""
        start = at
        while at - start < LONGEST and (yield from self._letter(at)) in tuple(SPACE):
            at += 1
        return at

    def _whole_value(self, at: int, most: int) -> Waits[int]:
        end = yield from self._value_end(at, most)
        if end is None:
            raise CutValue
        return end

    def _value_end(self, at: int, most: int | None = None) -> Waits[int | None]:
        """The place behind the JSON value at a place; None: the answer ends in it.

        Args:
            most: letters of a value; the place of a longer one is its beginning.
        """
        scan = ValueScan()
        start = at
        while True:
            end = scan.end_in(self._held[at:])
            if end is not None:
                return at + end
            at = max(at, len(self._held))
            if most is not None and at - start > most:
                return start
            if self._ended:
                return None
            yield


class ValueScan:
    """Looks for the end of a JSON value in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0  # of objects and lists
        self._quoted = False  # whether a text is open
        self._escaped = False  # whether a backslash stands before

    def end_in(self, piece: str) -> int | None:
        """The place behind the value in a piece; None: it goes on."""
        for at, letter in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
                if not self._quoted and not self._depth:
                    return at + 1
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return at + 1
            elif not self._depth and (letter in "}],:" or letter in SPACE):
                return at
        return None


def _text(written: str) -> str | None:
    """The text that JSON means; None: it is none."""
    with suppress(ValueError, RecursionError):
        value = json.loads(written)
        return value if isinstance(value, str) else None
    return None
