"""Lines of answers end between words on a terminal, whatever pieces the text comes in."""

from __future__ import annotations

import random
import textwrap

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


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_as_full_as_can_be(width: list[int], seed: int) -> None:
    dice = random.Random(seed)
    text = " ".join("x" * dice.randint(1, 20) for _ in range(60))
    assert shown(text, dice).split("\n") == textwrap.wrap(text, 23)


def test_a_text_that_fits_is_as_it_was(width: list[int]) -> None:
    text = "def f(x):\n    return x + 1\n\n\n  - one \n  - two\n"
    assert shown(text, random.Random(0)) == text


def test_a_word_that_no_line_holds_is_left_to_the_terminal(width: list[int]) -> None:
    text = "see " + "x" * 60 + " there"
    assert shown(text, random.Random(0)).replace("\n", "") == text


def test_a_word_is_held_until_it_is_whole(width: list[int]) -> None:
    wrapped = Wrapped()
    assert [wrapped.more(piece) for piece in ("some", "thing", " more ", "of")] == [
        "",
        "",
        "something more",
        "",
    ]
    assert wrapped.rest() == " of"


@pytest.mark.parametrize("columns", [0, 5])
def test_without_room_nothing_is_changed(width: list[int], columns: int) -> None:
    width[0] = columns
    text = "a word and another word that is longer than any of these"
    wrapped = Wrapped()
    assert [wrapped.more(piece) for piece in (text, " and more")] == [text, " and more"]
    assert wrapped.rest() == ""


def test_a_terminal_that_becomes_narrow_loses_nothing(width: list[int]) -> None:
    wrapped = Wrapped()
    first = wrapped.more("one two three fo")
    width[0] = 0
    assert first + wrapped.more("ur five") == "one two three four five"


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
