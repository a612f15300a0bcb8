"""Values that an answer writes as Python does, read as they come and written as JSON."""

from __future__ import annotations

import json
import re

from tokenswift.chat.parameters import NUMBER
from tokenswift.chat.values import SPACE

#: letters behind a backslash → what both stand for
ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\n": "",
    "\\": "\\",
    "/": "/",
    "'": "'",
    '"': '"',
}
#: the same → the number of digits that follow it
CODES = {"x": 2, "u": 4, "U": 8}
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false"}
WORDS["null"] = "null"
CLOSINGS = {"[": "]", "(": ")", "{": "}"}


class PythonScan:
    """Reads one value in text that comes in pieces.

    A word that is no number and none of Python's is a text. What cannot be a value at all gives
    what is no JSON.
    """

    def __init__(self) -> None:
        self._closings: list[str] = []  # of the lists and objects that are open
        self._quote = ""  # of the text that is open
        self._escape = ""  # backslash and what has come behind it
        self._high = ""  # half of a character, whose other half is to come
        self._word = ""
        self._comma = False  # one that stands before a further value, or before none
        self._pieces: list[str] = []

    def read(self, piece: str) -> tuple[str, int | None]:
        """The JSON that a piece adds, and the place behind the value in it; None: it goes on."""
        self._pieces = []
        end: int | None = None
        for at, letter in enumerate(piece):
            behind = self._letter(letter)
            if behind is not None:
                end = at + behind
                break
        return "".join(self._pieces), end

    def _letter(self, letter: str) -> int | None:
        """Read a letter; 0 or 1: the value ended before or behind it."""
        if self._quote:
            return self._letter_of_text(letter)
        if letter in "\"'" and not self._word:
            self._value()
            self._quote = letter
            self._pieces.append('"')
            return None
        if letter in SPACE or letter in ",:])}":
            return self._end_of_word(letter)
        if letter in CLOSINGS and not self._word:
            self._value()
            self._closings.append(CLOSINGS[letter])
            self._pieces.append("{" if letter == "{" else "[")
            return None
        self._word += letter
        return None

    def _end_of_word(self, letter: str) -> int | None:
        if self._word:
            self._value()
            is_key = letter == ":" and self._closings[-1:] == ["}"]
            self._pieces.append(_quoted(self._word) if is_key else _json_of_word(self._word))
            self._word = ""
            if not self._closings:
                return 0
        if letter in SPACE:
            return None
        if not self._closings:
            return 0
        if letter == ",":
            self._comma = True
        elif letter == ":":
            self._pieces.append(": ")
        elif letter == self._closings[-1]:
            self._comma = False
            closing = self._closings.pop()
            self._pieces.append("}" if closing == "}" else "]")
            return None if self._closings else 1
        return None

    def _value(self) -> None:
        """A value begins, or a key does."""
        if self._comma:
            self._pieces.append(", ")
        self._comma = False

    # ---- texts -----------------------------------------------------------------------------------

    def _letter_of_text(self, letter: str) -> int | None:
        if self._escape:
            self._escape += letter
            self._read_escape()
        elif letter == "\\":
            self._escape = letter
        elif letter == self._quote:
            self._say("")
            self._quote = ""
            self._pieces.append('"')
            return None if self._closings else 1
        else:
            self._say(letter)
        return None

    def _read_escape(self) -> None:
        """What a backslash and letters behind it stand for, once all of them have come."""
        letter = self._escape[1]
        digits = self._escape[2:]
        if letter not in CODES:
            self._say(ESCAPES.get(letter, self._escape))
        elif re.fullmatch("[0-9a-fA-F]*", digits) is None:
            self._say(self._escape[:-1])
            last = digits[-1]
            self._escape = ""
            self._letter_of_text(last)
            return
        elif len(digits) < CODES[letter]:
            return
        else:
            code = int(digits, 16)
            self._say(chr(code) if code <= 0x10FFFF else self._escape)
        self._escape = ""

    def _say(self, text: str) -> None:
        """Letters of a text; two halves of a character, as JSON escapes it, are one."""
        if self._high:
            text = (self._high + text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            self._high = ""
        if len(text) == 1 and "\ud800" <= text <= "\udbff":
            self._high = text
            return
        plain = "".join("\ufffd" if "\ud800" <= one <= "\udfff" else one for one in text)
        self._pieces.append(_quoted(plain)[1:-1])


def _json_of_word(word: str) -> str:
    if word in WORDS:
        return WORDS[word]
    number = word.removeprefix("+").replace("_", "")
    return number if NUMBER.fullmatch(number) else _quoted(word)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
