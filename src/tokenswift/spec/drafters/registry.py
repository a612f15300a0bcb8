"""What can draft: the library's own sources and the drafters of other packages, by name and letter.

Journals, reports, figures and adaptive drafting all ask here. Another package adds a drafter by an entry
point of the group ``tokenswift.drafters`` whose value is a class like `spec.drafters.drafter.Drafter`. Light:
nothing is loaded besides what those entry points name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from tokenswift.types import DraftSource, InputError

GROUP = "tokenswift.drafters"
#: the library's own: the target's choice, the draft heads and the target's own passes, n-grams of the text,
#: a drafted chain, text that a grammar forces, an EAGLE-3 drafter, rankings of earlier passes
OWN = (
    DraftSource("target", "t", "the model's own choice"),
    DraftSource("head", "h", "draft head"),
    DraftSource("ngram", "n", "n-gram"),
    DraftSource("chain", "c", "chain"),
    DraftSource("grammar", "g", "grammar"),
    DraftSource("eagle", "e", "EAGLE-3 drafter"),
    DraftSource("recycle", "r", "recycled ranking"),
)
HEAD, NGRAM, CHAIN, GRAMMAR, EAGLE, RECYCLE = OWN[1:]
#: names that are taken besides those of OWN
_MODES = ("plain", "hidden", "partial", "model", "lookup", "ngrams", "checked")
_NAME, _LETTER = re.compile(r"[a-z][a-z0-9_-]{0,31}\Z"), re.compile(r"[A-Z]\Z")
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\Z")


@cache
def others() -> tuple[type[Any], ...]:
    """The drafters of other packages, in order of their names.

    Raises:
        InputError: one cannot be loaded, or has a name, letter or colour that is not valid or is taken.
    """
    found: list[type[Any]] = []
    names, letters = {*_MODES, *(mark.name for mark in OWN)}, set[str]()
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        drafter = _load(point)
        mark = drafter.mark
        if not _NAME.match(mark.name) or mark.name in names:
            raise _wrong(
                point, f"the name {mark.name!r}", "a small letter, then a-z, 0-9, - and _; not taken"
            )
        if not _LETTER.match(mark.letter) or mark.letter in letters:
            raise _wrong(point, f"the letter {mark.letter!r}", "one of A to Z that no other has")
        for colour in (mark.light, mark.dark):
            if not _COLOUR.match(colour):
                raise _wrong(point, f"the colour {colour!r}", "# and six hexadecimal digits")
        names.add(mark.name)
        letters.add(mark.letter)
        found.append(drafter)
    return tuple(found)


@cache
def marks() -> Mapping[str, DraftSource]:
    """All sources of tokens by name, the library's own first."""
    known = [*OWN, *(drafter.mark for drafter in others())]
    return MappingProxyType({mark.name: mark for mark in known})


def mark_of(letter: str) -> DraftSource:
    """The source that a journal's letter stands for, also one whose package is not installed."""
    for mark in marks().values():
        if mark.letter == letter:
            return mark
    return DraftSource(f"drafter-{letter}", letter, f"drafter {letter} (not installed)")


def refresh() -> None:
    """Look for installed drafters again."""
    others.cache_clear()
    marks.cache_clear()


def _load(point: EntryPoint) -> type[Any]:
    try:
        drafter = point.load()
    except Exception as error:  # whatever another package's module raises, the user is told whose it is
        what = str(error).partition("\n")[0]
        raise _wrong(point, f"{type(error).__name__} ({what})", "a class that can be imported") from error
    if not isinstance(drafter, type) or not isinstance(getattr(drafter, "mark", None), DraftSource):
        raise _wrong(point, "no mark", "a class whose attribute mark is a tokenswift.types.DraftSource")
    for method in ("needs", "begin", "offer", "propose", "observe"):
        if not callable(getattr(drafter, method, None)):
            raise _wrong(
                point, f"no {method}", "a class with the methods of tokenswift.spec.drafters.drafter.Drafter"
            )
    return drafter


def _wrong(point: EntryPoint, what: str, valid: str) -> InputError:
    return InputError(f"the installed drafter {point.name} ({point.value}) has {what}; valid: {valid}")
