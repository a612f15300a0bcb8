"""What is gone on from: the beginnings of texts, so many tokens of each.

``shipped`` are four short texts of our own, for short prompts; ``pg19`` is the test part of PG-19
from the hub, through the package ``datasets``; ``code``, ``list`` and ``random`` (tokens) are
generated, of any length, and ``joined`` are the shipped texts one after another, again from the
start when they end; anything else is a folder of ``.txt`` files. Of a long text the beginning is
left out (title pages, contents).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenswift.checks import shown
from tokenswift.cli.measure import repeating_list
from tokenswift.types import InputError

SHIPPED = Path(__file__).parents[1] / "src/tokenswift/data/prompts"
PG19 = "emozilla/pg19-test"
LONG = 40_000  # characters of a text whose beginning is left out,
FRONT = 20_000  # so many of them
LETTERS = 12  # characters of a token, at most: what of a text is tokenised
#: sources of texts that are generated
GENERATED = ("code", "list", "random", "joined")


class Prompt(NamedTuple):
    """The beginning of a text.

    Attributes:
        name: of the text.
        ids: its tokens.
    """

    name: str
    ids: list[int]

    @property
    def about(self) -> dict[str, object]:
        """What a row says of it."""
        digest = hashlib.sha256(" ".join(map(str, self.ids)).encode()).hexdigest()[:16]
        return {"name": self.name, "tokens": len(self.ids), "digest": digest}


def check_source(source: str) -> None:
    """See that a source is there, before anything runs.

    Raises:
        InputError: no such folder, or no texts in it.
    """
    if (
        source in GENERATED
        or source in ("shipped", "pg19")
        or any(Path(source).expanduser().glob("*.txt"))
    ):
        return
    raise InputError(
        f"prompts is {shown(source)}; valid: shipped, pg19, or a folder with .txt files"
    )


def generated(
    source: str, encode: Callable[[str], list[int]], length: int, vocabulary: int
) -> list[int]:
    """The tokens of one of :data:`GENERATED`."""
    if source == "random":
        generator = random.Random(0)
        return [generator.randrange(vocabulary) for _ in range(length)]
    if source == "joined":
        ids = encode("\n\n".join(text for _, text in _texts("shipped")))
        return (ids * (1 + length // len(ids)))[:length]
    if source == "list":
        return encode(repeating_list(length))[:length]
    return encode(generated_code(1 + length // 400))[:length]


def generated_code(repeats: int) -> str:
    """Python functions that look alike, fifteen of them, over and over with other numbers."""
    verbs = ("load", "save", "parse", "check", "merge")
    names = [f"{verb}_{noun}" for verb in verbs for noun in ("row", "table", "key")]
    functions = (
        f"def {name}(data, limit={i % 7}):\n"
        f"    if data is None:\n"
        f"        raise ValueError('no {name}')\n"
        f"    found = [entry.{name} for entry in data if entry.size > limit]\n"
        f"    return sorted(found)\n\n\n"
        for i, name in enumerate(names * repeats)
    )
    return "".join(functions)


def prompt(
    source: str, encode: Callable[[str], list[int]], index: int, length: int, vocabulary: int = 0
) -> Prompt:
    """One of a source's prompts.

    Args:
        encode: text to tokens, special ones before it included.
        index: which of the texts that are long enough, from 0.
        length: tokens.
        vocabulary: what random tokens are drawn from.
    Raises:
        InputError: there are fewer such texts.
    """
    if source in GENERATED:
        return Prompt(source, generated(source, encode, length, vocabulary))
    long_enough = 0
    for name, text in _texts(source):
        start = text.find("\n\n", FRONT) + 2 if len(text) >= LONG else 0
        ids = encode(text[start : start + LETTERS * length])[:length]
        if len(ids) < length:
            continue
        if long_enough == index:
            return Prompt(name, ids)
        long_enough += 1
    raise InputError(
        f"prompts is {source!r} with {long_enough} texts of {length} tokens, {index + 1} are "
        "needed; valid: shorter prompts, or a folder with longer .txt files"
    )


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """Names and texts."""
    if source == "pg19":
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]

        for number, row in enumerate(load_dataset(PG19, split="test", streaming=True)):
            yield str(row.get("short_book_title") or number), row["text"]
        return
    folder = SHIPPED if source == "shipped" else Path(source).expanduser()
    for file in sorted(folder.glob("*.txt")):
        yield file.stem, file.read_text(encoding="utf-8", errors="replace")
