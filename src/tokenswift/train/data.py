"""Training text: where it comes from, and how blocks and passages are taken from it.

Texts are UTF-8 files, JSONL files (field "text"), folders of both, or ``pg19`` (through the ``datasets``
package). They are streamed: one text is in memory at a time (a large file comes in pieces), and hardly
more of it is tokenised than is used. Every block and passage begins as decoding begins a text: with the
tokenizer's own first tokens (BOS).
"""

from __future__ import annotations

import logging
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import chain, product
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tokenswift.loader.identity import digest_of, file_digest
from tokenswift.types import InputError

SHORTEST = 64  # tokens; shorter remainders of a document teach little
ENDLESS = ("pg19",)  # sources that are streamed and whose size is not known
BOOKS = 128  # texts of an endless source that the wanted tokens are taken from, at least
PIECE = 1 << 25  # characters of a file in memory at once
MOST_CHARACTERS = 6  # that a token is thought to have


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any: ...


class _Line(msgspec.Struct):
    """What is read of a line of a JSONL file."""

    text: str


def prefix_of(tokenizer: Encoder) -> list[int]:
    """The tokens that the tokenizer puts before a text (BOS, or none), as ``LLM.encode`` does."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def check_source(source: str) -> None:
    """Raise :class:`InputError` when ``--data`` names nothing."""
    if source not in ("self", *ENDLESS) and not Path(source).exists():
        raise InputError(f"--data {source} does not exist; valid: a text or JSONL file, a folder, self, pg19")


def files_of(source: str) -> list[Path]:
    """The files of a local source, in order."""
    check_source(source)
    path = Path(source)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl"))
    if not files:
        raise InputError(f"--data {source} holds no .txt or .jsonl file")
    return files


def fingerprint(source: str) -> str:
    """What a source holds: a hash of its files' contents, wherever they lie; its name if it has no files."""
    if source in ("self", *ENDLESS):
        return source
    try:
        return digest_of([[file_digest(file), file.suffix] for file in files_of(source)])
    except OSError as error:
        raise InputError(f"--data {error.filename} cannot be read: {error.strerror}") from error


def read_texts(source: str) -> Iterator[str]:
    """The documents of a file, a folder, or ``pg19``, one after the other; a large text comes in pieces."""
    if source == "pg19":
        yield from _pg19()
        return
    for file in files_of(source):
        try:
            if file.suffix == ".jsonl":
                yield from _lines(file)
                continue
            with file.open(encoding="utf-8", newline="") as opened:
                while piece := opened.read(PIECE):
                    yield piece
        except UnicodeDecodeError as error:
            raise InputError(f"--data {file} is not UTF-8 ({error.reason})") from error
        except OSError as error:
            raise InputError(f"--data {file} cannot be read: {error.strerror}") from error


def _lines(file: Path) -> Iterator[str]:
    decoder = msgspec.json.Decoder(_Line)
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            try:
                if line.strip():
                    yield decoder.decode(line).text
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise InputError(
                    f"--data {file} line {number}: {error}; valid: a JSON object with a field text"
                ) from error


def _pg19() -> Iterator[str]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ImportError as error:
        raise InputError("--data pg19 needs the package datasets; pip install datasets") from error
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries, a line each
    try:
        for row in load_dataset("emozilla/pg19", split="train", streaming=True):
            yield row["text"]
    except Exception as error:  # the hub's own errors are many
        raise InputError(
            f"--data pg19 cannot be loaded: {type(error).__name__}; name a local file"
        ) from error


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


def first_tokens(text: str, tokenizer: Encoder, count: int) -> list[int]:
    """The first ``count`` tokens of a text, or all; hardly more of it is tokenised."""
    size = MOST_CHARACTERS * count
    while True:
        tokens = list(tokenizer(text[:size], add_special_tokens=False)["input_ids"])
        if len(tokens) >= count or size >= len(text):
            return tokens[:count]
        size *= 4


def _shares(source: str, wanted: int, least: int) -> Iterator[tuple[str, int]]:
    """The documents that are to give something, each with how much of ``wanted``: by their lengths, or for a
    :data:`BOOKS`-th where the source is endless.

    Args:
        least: of a share; what a short document would give is left to a later one.
    """
    endless = source in ENDLESS
    total = BOOKS if endless else sum(map(len, read_texts(source)))
    credit = 0  # times total
    for text in read_texts(source):
        credit += max(wanted, least * BOOKS) if endless else wanted * len(text)
        if credit < total * min(least, max(SHORTEST, len(text) // 4)):
            continue
        share = credit // total
        share -= share % least if share > least else 0
        credit -= share * total
        yield text, share


def blocks(
    source: str, tokenizer: Encoder, limit: int, length: int, prefix: Sequence[int] = ()
) -> Iterator[list[int]]:
    """Blocks of at most ``length`` tokens, none across two documents, ``limit`` tokens in all.

    Documents give in proportion to their lengths, long ones whole blocks; short remainders are dropped.

    Args:
        prefix: tokens that every block begins with.
    """
    room, left = length - len(prefix), limit
    shortest = room if source in ENDLESS else min(SHORTEST, room)
    for text, share in _shares(source, limit, room):
        tokens = first_tokens(text, tokenizer, min(share, left))
        for start in range(0, len(tokens), room):
            piece = tokens[start : start + room]
            if len(piece) >= shortest:
                left -= len(piece)
                yield [*prefix, *piece]
        if left < shortest:
            return


def passages(
    source: str, tokenizer: Encoder, lengths: Sequence[int], prefix: Sequence[int], seed: int
) -> list[list[int]]:
    """A passage of each of these lengths, from random places spread over the documents.

    Args:
        lengths: tokens of each passage, the prefix included.
        prefix: tokens that every passage begins with.
    Raises:
        InputError: no document is as long as the longest.
    """
    choose, found = random.Random(seed), dict[int, list[int]]()
    wanted = [(length - len(prefix), place) for place, length in enumerate(lengths)]
    choose.shuffle(wanted)

    def take(text: str, most: int) -> None:
        for _ in range(min(most, len(wanted))):
            length, place = wanted[-1]
            start = choose.randrange(max(1, len(text) - MOST_CHARACTERS * length))
            tokens = first_tokens(_from_word(text, start), tokenizer, length)
            if len(tokens) < length:
                return
            found[place] = [*prefix, *tokens]
            wanted.pop()

    for text, share in _shares(source, len(wanted), 1):
        take(text, share)
        if not wanted:
            break
    wanted.sort()  # what short documents could not give is any other's to give, the longest first
    for text in read_texts(source) if wanted else ():
        take(text, len(wanted))
    if wanted:
        raise InputError(f"--data {source} has no document of {wanted[-1][0]} tokens")
    return [found[place] for place in range(len(lengths))]


def _from_word(text: str, start: int) -> str:
    """The text from the first white space at or after ``start`` on."""
    space = re.compile(r"\s").search(text, start, start + 256) if start else None
    return text[space.start() if space else start :]
