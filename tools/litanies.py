"""Hold the guards against litanies and loops to texts: novels must raise no alarm, litanies one.

    python tools/litanies.py FOLDER [FOLDER …]

Every text file of the folders (``text.txt`` of runs among them) is given to the guards: to that
against litanies in pieces of four characters, about as long as tokens are, and to those against
loops in words and signs. A line for each alarm is printed, and at last how many files and
characters raised none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenswift.engine.litany import LitanyGuard
from tokenswift.engine.loops import CopyGuard, LoopGuard
from tokenswift.types import Litany, Loop

PIECE = 4  # characters of a piece
WORD = re.compile(r" ?\w+|\s+|[^\w\s]")
ENDINGS = (".txt", ".md", ".py", ".c", ".h", ".toml", ".csv", ".json")


def pieces_of(text: str) -> Iterator[str]:
    """A text in pieces that are about as long as tokens."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def litany_of(text: str) -> Litany | None:
    """The first litany of a text; its places are counted in pieces. None: there is none."""
    guard = LitanyGuard()
    for piece in pieces_of(text):
        guard.push(piece)
        if guard.first is not None:
            break
    return guard.first


def loop_of(text: str) -> Loop | None:
    """The first loop of a text; its places are counted in words. None: there is none."""
    exact = LoopGuard()
    copied = CopyGuard()
    ids: dict[str, int] = {}
    for word in WORD.findall(text):
        token = ids.setdefault(word, len(ids))
        exact.push(token)
        copied.push(token)
        loop = exact.loop or copied.loop
        if loop is not None:
            return loop
    return None


def main(folders: list[str]) -> int:
    """Print the alarms of all files.

    Returns:
        0.
    """
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*"))]
    texts = [path for path in files if path.suffix in ENDINGS and path.is_file()]
    quiet = 0
    characters = 0
    for path in texts:
        text = path.read_text(encoding="utf-8", errors="replace")
        litany = litany_of(text)
        loop = loop_of(text)
        if litany is None and loop is None:
            quiet += 1
            characters += len(text)
        if litany is not None:
            place = PIECE * litany.start
            print(f'{path}: from character {place:,} on ("{litany.opening} …")')
        if loop is not None:
            print(f"{path}: from word {loop.start:,} on, {loop.size} again and again")
    print(f"{len(texts)} files, {quiet} without an alarm ({characters:,} characters)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
