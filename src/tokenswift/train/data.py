"""Training text: where it comes from, and how blocks and passages are taken from it.

Texts are UTF-8 files, JSONL files (field "text"), folders of both, or ``pg19`` (through the ``datasets``
package). They are streamed: one text is in memory at a time (a large file comes in pieces), and hardly
more of it is tokenised than is used. Every block and passage begins as decoding begins a text: with the
tokenizer's own first tokens (BOS).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tokenswift.checks import check_text
from tokenswift.types import InputError
from tokenswift.words import counted

SHORTEST = 64  # tokens; shorter remainders of a document teach little
ENDLESS = ("pg19",)  # sources that are streamed and whose size is not known
BOOKS = 128  # texts of an endless source that the wanted tokens are taken from, at least
PIECE = 1 << 25  # bytes of a file in memory at once


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any: ...


def prefix_of(tokenizer: Encoder) -> list[int]:
    """The tokens that the tokenizer puts before a text (BOS, or none), as ``LLM.encode`` does."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def files_of(source: str) -> list[Path]:
    """The files of a local source, in order."""
    check_source(source)
    path = Path(source)
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl"))
    if not files:
        raise InputError(f"--data {source} holds no .txt or .jsonl file")
    return files


def read_texts(source: str) -> Iterator[str]:
    """The documents of a file, a folder, or ``pg19``, one after the other."""
    if source == "pg19":
        yield from _pg19()
        return
    for file in files_of(source):
        yield from _jsonl(file) if file.suffix == ".jsonl" else _text(file)


def check_source(source: str) -> None:
    """Raise :class:`InputError` when ``--data`` names nothing."""
    if source not in ("self", *ENDLESS) and not Path(source).exists():
        raise InputError(f"--data {source} does not exist; valid: a text or JSONL file, a folder, self, pg19")


def fingerprint(source: str) -> str:
    """What a source holds: a hash of its files' contents, wherever they lie; its name if it has no files."""
    if source in ("self", *ENDLESS):
        return source
    whole = hashlib.sha256()
    for file in files_of(source):
        try:
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest() + file.suffix.encode())
        except OSError as error:
            raise InputError(f"--data {file} cannot be read: {error.strerror}") from error
    return whole.hexdigest()


def _text(file: Path) -> Iterator[str]:
    """The text of a file; one longer than :data:`PIECE` comes in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at, empty = 0, True
    try:
        with file.open("rb") as opened:
            while piece := opened.read(PIECE):
                waiting = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(piece, final=len(piece) < PIECE)
                except UnicodeDecodeError as error:
                    bad = at - waiting + error.start
                    raise InputError(f"--data {file} is not UTF-8 (byte {bad})") from error
                at, empty = at + len(piece), False
                yield text
    except OSError as error:
        raise InputError(f"--data {file} cannot be read: {error.strerror}") from error
    if empty:
        yield ""


def _jsonl(file: Path) -> Iterator[str]:
    at = 0
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(f"--data {file} is not UTF-8 (byte {at + error.start})") from error
                at += len(line)
                if text.strip():
                    yield _field(file, number, text)
    except OSError as error:
        raise InputError(f"--data {file} cannot be read: {error.strerror}") from error


def _field(file: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"--data {file} line {number} is not JSON: {error.msg}") from error
    if isinstance(record, dict) and isinstance(record.get("input_ids"), list):
        raise InputError(
            f"--data {file} line {number} holds token ids of some tokenizer; valid: a field text"
        )
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise InputError(f"--data {file} line {number} has no field text that is a string")
    try:
        return check_text("text", record["text"])
    except InputError as error:
        raise InputError(f"--data {file} line {number}: {error}") from error


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


def first_tokens(text: str, tokenizer: Encoder, count: int) -> list[int]:
    """The first ``count`` tokens of a text, or all; hardly more of it is tokenised.

    It is read in pieces that end at white space, each about as long as the rest should be.
    """
    tokens: list[int] = []
    at, rate = 0, 1.0  # characters, and characters a token
    while len(tokens) < count and at < len(text):
        end = at + int((count - len(tokens)) * rate) + 16
        space = re.compile(r"\s").search(text, end, end + 256)
        end = space.start() if space else end
        tokens += tokenizer(text[at:end], add_special_tokens=False)["input_ids"]
        at = end
        rate = at / max(1, len(tokens))
    return tokens[:count]


def blocks(
    source: str, tokenizer: Encoder, limit: int, length: int, prefix: Sequence[int] = ()
) -> Iterator[list[int]]:
    """Blocks of at most ``length`` tokens, none across two documents, ``limit`` tokens in all.

    Local documents give in proportion to their lengths, long ones whole blocks; short remainders are
    dropped. Of an endless source only whole blocks are taken, from at least :data:`BOOKS` of its texts.

    Args:
        prefix: tokens that every block begins with.
    """
    room = length - len(prefix)
    endless = source in ENDLESS
    total = 0 if endless else sum(map(len, read_texts(source)))
    left, credit = limit, 0.0
    for text in read_texts(source):
        if left < (room if endless else 1):
            return
        if endless:
            credit = max(room, limit // BOOKS // room * room)
        else:
            credit += limit * len(text) / max(total, 1)
            if credit < min(room, max(SHORTEST, len(text) // 4)):
                continue  # of many short documents a part is enough: its share goes to a later one
        want = min(left, round(credit))
        if want > room and (endless or limit < total):
            want -= want % room
        tokens = first_tokens(text, tokenizer, want)
        credit -= len(tokens)
        for start in range(0, len(tokens), room):
            piece = tokens[start : start + room]
            if len(piece) >= (room if endless else min(SHORTEST, room)):
                left -= len(piece)
                yield [*prefix, *piece]


def passages(
    source: str, tokenizer: Encoder, lengths: Sequence[int], prefix: Sequence[int], seed: int
) -> list[list[int]]:
    """A passage of each of these lengths, from random places spread over the documents.

    Args:
        lengths: tokens of each passage, the prefix included.
        prefix: tokens that every passage begins with.
    """
    wanted = [length - len(prefix) for length in lengths]
    if source in ENDLESS:
        found = _streamed(source, tokenizer, wanted, seed)
    else:
        found = _spread(source, tokenizer, wanted, seed)
    return [[*prefix, *passage] for passage in found]


def _streamed(source: str, tokenizer: Encoder, wanted: list[int], seed: int) -> list[list[int]]:
    """Passages of the first texts of an endless source, a few of each."""
    choose, found = random.Random(seed), list[list[int]]()
    each = max(1, len(wanted) // BOOKS)
    for text in read_texts(source):
        for length in wanted[len(found) : len(found) + each]:
            start = choose.randrange(max(1, len(text) - 8 * length))
            passage = first_tokens(_from_word(text, start), tokenizer, length)
            if len(passage) == length:
                found.append(passage)
        if len(found) == len(wanted):
            return found
    raise InputError(f"--data {source} gave {len(found)} passages; {len(wanted)} are needed")


def _spread(source: str, tokenizer: Encoder, wanted: list[int], seed: int) -> list[list[int]]:
    """Passages of local documents, each document by its length."""
    choose = random.Random(seed)
    sizes = [len(text) for text in read_texts(source)]
    found: dict[int, list[int]] = {}
    short = dict.fromkeys(range(len(sizes)), -1)  # tokens that a document is known to have, at most
    while len(found) < len(wanted):
        places: dict[int, list[tuple[int, float]]] = {}
        for i, length in enumerate(wanted):
            if i in found:
                continue
            fit = [d for d, size in enumerate(sizes) if size and not 0 <= short[d] < length]
            if not fit:
                longest = max(short.values(), default=0)
                raise InputError(
                    f"--data {source} has no document of {length} tokens (the longest has {max(0, longest)})"
                )
            document = choose.choices(fit, [sizes[d] for d in fit])[0]
            places.setdefault(document, []).append((i, choose.random()))
        for document, text in enumerate(read_texts(source)):
            for i, where in places.get(document, ()):
                passage = _passage(text, tokenizer, wanted[i], where)
                if len(passage) == wanted[i]:
                    found[i] = passage
                else:
                    short[document] = len(passage)
    return [found[i] for i in range(len(wanted))]


def _passage(text: str, tokenizer: Encoder, length: int, where: float) -> list[int]:
    """``length`` tokens from a place (0 to 1) of a text; fewer only where the whole text has fewer."""
    start = int(where * len(text))
    passage = first_tokens(_from_word(text, start), tokenizer, length)
    while len(passage) < length and start > 0:  # too near the end: the last tokens of a longer piece
        start = max(0, start - 8 * length)
        passage = list(tokenizer(_from_word(text, start), add_special_tokens=False)["input_ids"])[-length:]
    return passage


def _from_word(text: str, start: int) -> str:
    """The text from the first white space at or after ``start`` on."""
    space = re.compile(r"\s").search(text, start, start + 256) if start else None
    return text[space.start() if space else start :]


def check_tokens(tokens: Iterable[int], vocab_size: int) -> None:
    """Raise :class:`InputError` when a tokenizer and a model do not belong together."""
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        raise InputError(f"the tokenizer gives token {largest}, the model's vocabulary has {vocab_size}")


def check_amount(source: str, tokenizer: Encoder, needed: int) -> NoReturn:
    """Say why a source gives too little to learn from."""
    found = 0
    for text in read_texts(source):
        found += len(first_tokens(text, tokenizer, needed))
        if found >= needed:
            raise InputError(f"--data {source} has too few texts of at least {SHORTEST} tokens")
    if not found:
        raise InputError(f"--data {source} is empty")
    raise InputError(f"--data {source} has {counted(found, 'token')}; at least {needed:,} are needed")
