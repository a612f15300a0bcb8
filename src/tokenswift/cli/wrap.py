"""Line ends of a text on a terminal: between words, where the terminal itself would cut one in two."""

from __future__ import annotations

import os
import sys

LEAST = 10  # columns of a terminal that has room for words
TAB = 8


def columns() -> int:
    """Columns of the terminal that standard output is; 0: it is none, or does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return 0


class Wrapped:
    """A text that comes in pieces. A word is held until it is whole, and begins a line where it does not fit
    on the one before; a word that no line holds is left to the terminal, and everything where there is none.

    Letters of two columns (Chinese, say) are words of their own. The last column stays empty: terminals
    differ in what they do behind it.
    """

    def __init__(self) -> None:
        self._column = 0
        self._gap, self._word = "", ""  # what is held: white space and the word behind it

    def more(self, text: str) -> str:
        """What is to be shown once ``text`` has come."""
        most = columns() - 1
        if most < LEAST:
            return self.rest() + text
        shown = ""
        for letter in text:
            if letter == "\n":
                shown += self.rest() + "\n"
            elif letter in " \t":
                shown += self._placed(most)
                self._gap += letter
            elif _width(letter) > 1:
                shown += self._placed(most)
                self._word = letter
                shown += self._placed(most)
            else:
                self._word += letter
                if len(self._word) > most:
                    shown += self._placed(most)
        return shown

    def rest(self) -> str:
        """What is still held, as a line or the text ends, or something else is shown in the middle of it."""
        most = columns() - 1
        shown = self._placed(most)
        if most < LEAST or self._behind(self._gap) <= most:
            shown += self._gap
        self._gap, self._column = "", 0
        return shown

    def _placed(self, most: int) -> str:
        """The held word where it belongs; "" for none."""
        gap, word, width = self._gap, self._word, _width(self._word)
        if not word:
            return ""
        self._gap = self._word = ""
        start = self._behind(gap)
        if LEAST <= most and width <= most < start + width:
            self._column = width
            return "\n" + word
        self._column = start + width if width <= most else (start + width) % max(most + 1, 1)
        return gap + word

    def _behind(self, gap: str) -> int:
        """The column behind white space."""
        column = self._column
        for letter in gap:
            column += TAB - column % TAB if letter == "\t" else 1
        return column


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
