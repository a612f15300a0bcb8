"""Tables: whole in a pipe, as wide as a terminal, and nothing in them commands it."""

from __future__ import annotations

import sys

import pytest

from tests.cli.conftest import Stream
from tokenswift.cli.tables import table

ROWS = [("one", "a long text of several words", "1"), ("two\x1b[31m", "short\nlines", "10")]


def test_in_a_pipe() -> None:
    assert table(ROWS, ("name", "text", "n"), right=(2,)).splitlines() == [
        "name            text                            n",
        "─" * 49,
        "one             a long text of several words    1",
        "two\\u001b[31m   short lines                    10",
    ]
    assert table([("a", "b")], indent=2) == "  a  b"


@pytest.mark.parametrize("plain", [False, True])
def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    stream = Stream(True)
    monkeypatch.setenv("COLUMNS", "34")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        shown = table(ROWS, ("name", "text", "n"), right=(2,))
    assert ("\x1b" in shown) != plain and "\\u001b" in shown
    if plain:
        assert max(map(len, shown.splitlines())) <= 34 and len(shown.splitlines()) > 4
