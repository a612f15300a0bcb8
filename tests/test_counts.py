"""One of a thing is said in the singular."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenswift.words import counted

SOURCE = Path(__file__).parents[1] / "src" / "tokenswift"
#: a number of things that may be one, behind what counts them
COUNTS = re.compile(
    r"(?:\{len\([^{}]*\)(?::,)?\}|(?<!of )%d) "
    r"(tokens|texts|messages|passes|runs|prompts|files|answers|heads|bytes|requests|nodes|threads)\b"
)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ((1, "token"), "1 token"),
        ((0, "token"), "0 tokens"),
        ((2000, "token"), "2,000 tokens"),
        ((1, "pass", "passes"), "1 pass"),
        ((2, "pass", "passes"), "2 passes"),
    ],
)
def test_counted(call: tuple[int, str], said: str) -> None:
    assert counted(*call) == said


def test_messages_count_in_words() -> None:
    found = {}
    for file in (file for part in ("cli", "runs", "audit") for file in (SOURCE / part).rglob("*.py")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if COUNTS.search(line):
                found[f"{file.relative_to(SOURCE)}: {line.strip()}"] = line
    assert not found
