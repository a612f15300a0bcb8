"""What a model is to learn from: documents in passages, or questions to answer."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from importlib import resources
from itertools import chain, product
from pathlib import Path

from tokenswift.files import line_of
from tokenswift.loader.identity import digest_of, file_digest
from tokenswift.tokenizer import Tokenizer
from tokenswift.train.work import BadData
from tokenswift.types import InputError

SHORTEST = 64  # tokens; shorter remainders of a document teach little
PIECE = 1 << 25  # characters of a file in memory at once
MOST_CHARACTERS = 8  # that a token is thought to have
TEMPERATURES = (0.7, 1.0)  # of answers


def files_of(source: str, option: str = "--data") -> list[Path]:
    """The files of ``--data``, in order.

    Args:
        option: that names the source, for the message.
    Raises:
        InputError: there are none.
    """
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise InputError(
            f"{option} {source} holds no text; valid: self, a text file or a folder of .txt files"
        )
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
            with file.open(encoding="utf-8", newline="") as stream:
                while True:
                    piece = stream.read(PIECE)
                    if not piece:
                        break
                    yield piece
        except UnicodeDecodeError as error:
            raise BadData(f"--data {file} is not UTF-8; valid: UTF-8 text") from error
        except OSError as error:
            reason = line_of(error)
            raise BadData(f"--data {file} cannot be read ({reason}); valid: UTF-8 text") from error


def questions(seed: int) -> Iterator[tuple[str, float]]:
    """Questions to a model, for answers that can be learnt from, and the answers' temperatures.

    They are of six kinds in turns, and have no end.
    """
    return _filled("questions.toml", seed)


def openings(seed: int) -> Iterator[str]:
    """Beginnings of prose for a model to continue, of several kinds in turns, without an end."""
    return (opening for opening, _ in _filled("openings.toml", seed))


def _filled(name: str, seed: int) -> Iterator[tuple[str, float]]:
    """The tasks of a file of the package, each with a topic in its place, and a temperature: one of
    each kind in turns, all pairs of a kind in an order of chance before any comes again."""
    text = resources.files("tokenswift").joinpath(f"data/{name}").read_text("utf-8")
    kinds = tomllib.loads(text)
    generator = random.Random(seed)

    def endless(kind: dict[str, list[str]]) -> Iterator[tuple[str, float]]:
        while True:
            pairs = list(product(kind["tasks"], kind["topics"]))
            for task, topic in generator.sample(pairs, len(pairs)):
                yield task.replace("{0}", topic), generator.choice(TEMPERATURES)

    return chain.from_iterable(zip(*map(endless, kinds.values()), strict=True))


def blocks(source: str, tokenizer: Tokenizer, limit: int, length: int) -> Iterator[list[int]]:
    """Blocks of at most ``length`` tokens, none across two documents, about ``limit`` tokens in
    all.

    Documents give in proportion to their lengths, long ones whole blocks; short remainders are
    dropped.
    """
    prefix = list(tokenizer("")["input_ids"])
    room = length - len(prefix)
    shortest = min(SHORTEST, room)
    total = max(1, sum(map(len, read_texts(source))))
    credit = 0
    for text in read_texts(source):
        credit += limit * len(text)  # times total
        share = credit // total
        share -= share % room if share > room else 0
        if share < shortest:
            continue  # what a short document would give is left to a later one
        credit -= share * total
        begin = text[: MOST_CHARACTERS * share]  # hardly more is tokenised than is used
        tokens = list(tokenizer(begin, add_special_tokens=False)["input_ids"])[:share]
        for start in range(0, len(tokens), room):
            block = tokens[start : start + room]
            if len(block) >= shortest:
                yield [*prefix, *block]
