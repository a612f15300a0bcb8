"""Lines of answers end between words on a terminal, whatever pieces the text comes in."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len

from tests.cli.conftest import Stream
from tokenswift.cli import wrap as module
from tokenswift.cli.output import TextSink
from tokenswift.cli.wrap import Wrapped

WORDS = [
    "a",
    "of",
    "well",
    "indeed,",
    "extraordinary",
    "—",
    "naïve",
    "\t",
    "  ",
    "\n",
    "你好",
    "e\u0301te\u0301",
]


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The terminal's columns."""
    made = [24]
    monkeypatch.setattr(module, "columns", lambda: made[0])
    return made


def shown(text: str, pieces: random.Random) -> str:
    wrapped, out = Wrapped(), ""
    while text:
        cut = pieces.randint(1, 9)
        out, text = out + wrapped.more(text[:cut]), text[cut:]
    return out + wrapped.rest()


def columns_of(line: str) -> int:
    at = 0
    for letter in line:
        at += 8 - at % 8 if letter == "\t" else cell_len(letter)
    return at


@pytest.mark.parametrize("seed", range(40))
def test_lines_fit_and_words_are_whole(width: list[int], seed: int) -> None:
    dice = random.Random(seed)
    text = " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, 60)))
    out = shown(text, dice)
    assert all(columns_of(line) < 24 for line in out.split("\n")), out
    joined = out.replace("你", " 你 ").replace("好", " 好 ").split()
    assert joined == text.replace("你", " 你 ").replace("好", " 好 ").split()
    assert shown(text, random.Random(seed + 1)) == out  # whatever the pieces


def test_what_a_terminal_would_obey_counts_as_it_is_shown(
    width: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stdout", stream)
    sink = TextSink(None, wrap=True)
    for piece in ("one two three four", "\x1b[2J", " five"):
        sink.write(piece)
    sink.close()
    assert stream.text == "one two three\nfour\\u001b[2J five\n"
    raw = TextSink(None, raw=True, wrap=True)
    raw.write("one two three four\x1b[2J five")
    raw.close()
    assert stream.text.endswith("one two three four\x1b[2J five\n")
