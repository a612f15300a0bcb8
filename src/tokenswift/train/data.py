"""Training text: where it comes from, and how blocks are taken from it.

Texts are UTF-8 files, JSONL files (field "text") and folders of both. They are streamed: one text is in
memory at a time (a large file comes in pieces), and hardly more of it is tokenised than is used. Every block
begins as decoding begins a text: with the tokenizer's own first tokens (BOS).
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from importlib import resources
from itertools import chain, product
from pathlib import Path
from typing import Any

import msgspec

from tokenswift.loader.weights import digest_of, file_digest
from tokenswift.types import InputError

SHORTEST = 64  # tokens; shorter remainders of a document teach little
PIECE = 1 << 25  # characters of a file in memory at once
MOST_CHARACTERS = 8  # that a token is thought to have


class _Line(msgspec.Struct):
    """What is read of a line of a JSONL file."""

    text: str


def check_source(source: str) -> None:
    """Raise :class:`InputError` when ``--data`` names nothing."""
    if source != "self" and not Path(source).exists():
        raise InputError(f"--data {source} does not exist; valid: self, a text or JSONL file, or a folder")


def files_of(source: str) -> list[Path]:
    """The files of a source, in order."""
    check_source(source)
    path = Path(source)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl"))
    if not files:
        raise InputError(f"--data {source} holds no .txt or .jsonl file")
    return files


def fingerprint(source: str) -> str:
    """What a source holds: a hash of its files' contents, wherever they lie."""
    if source == "self":
        return source
    return digest_of([[file_digest(file), file.suffix] for file in files_of(source)])


def read_texts(source: str) -> Iterator[str]:
    """The documents of a file or a folder, one after the other; a large text comes in pieces."""
    for file in files_of(source):
        try:
            if file.suffix == ".jsonl":
                with file.open("rb") as opened:
                    yield from (msgspec.json.decode(line, type=_Line).text for line in opened if line.strip())
                continue
            with file.open(encoding="utf-8", newline="") as opened:
                while piece := opened.read(PIECE):
                    yield piece
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            valid = (
                "a JSON object with a field text in each line" if file.suffix == ".jsonl" else "UTF-8 text"
            )
            raise InputError(f"--data {file}: {error}; valid: {valid}") from error


def questions(seed: int) -> Iterator[tuple[str, float]]:
    """Without an end: what a model is asked, of six kinds in turns, for answers that can be learnt from, and
    their temperature."""
    text = resources.files("tokenswift").joinpath("data/questions.toml").read_text("utf-8")
    kinds = tomllib.loads(text)
    drawn = random.Random(seed)

    def endless(kind: dict[str, list[str]]) -> Iterator[tuple[str, float]]:
        while True:
            pairs = list(product(kind["tasks"], kind["topics"]))
            for task, topic in drawn.sample(pairs, len(pairs)):
                yield task.replace("{0}", topic), drawn.choice((0.7, 1.0))

    yield from chain.from_iterable(zip(*map(endless, kinds.values()), strict=True))


def blocks(source: str, tokenizer: Any, limit: int, length: int) -> Iterator[list[int]]:
    """Blocks of at most ``length`` tokens, none across two documents, about ``limit`` tokens in all.

    Documents give in proportion to their lengths, long ones whole blocks; short remainders are dropped.
    """
    prefix = list(tokenizer("")["input_ids"])
    room = length - len(prefix)
    total, credit, shortest = max(1, sum(map(len, read_texts(source)))), 0, min(SHORTEST, room)
    for text in read_texts(source):
        credit += limit * len(text)  # times total
        share = credit // total
        share -= share % room if share > room else 0
        if share < shortest:
            continue  # what a short document would give is left to a later one
        credit -= share * total
        piece = text[: MOST_CHARACTERS * share]  # hardly more is tokenised than is used
        tokens = list(tokenizer(piece, add_special_tokens=False)["input_ids"])[:share]
        pieces = (tokens[start : start + room] for start in range(0, len(tokens), room))
        yield from ([*prefix, *piece] for piece in pieces if len(piece) >= shortest)
