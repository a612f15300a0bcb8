"""Training text: where it comes from, and how it is cut into blocks.

Texts are UTF-8 files, JSONL files (field "text"), folders of both, or ``pg19`` (through the
``datasets`` package). Documents are cut to blocks that never cross a document's end.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tokenswift.types import InputError

SHORTEST = 64  # tokens; shorter remainders of a document teach little


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...


def read_texts(source: str) -> Iterator[str]:
    """The documents of a file, a folder, or ``pg19``."""
    if source == "pg19":
        yield from _pg19()
        return
    check_source(source)
    path = Path(source)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl"))
    if not files:
        raise InputError(f"--data {source} holds no .txt or .jsonl file")
    for file in files:
        yield from _jsonl(file) if file.suffix == ".jsonl" else [_text(file)]


def check_source(source: str) -> None:
    """Raise :class:`InputError` when ``--data`` names nothing."""
    if source not in ("self", "pg19") and not Path(source).exists():
        raise InputError(f"--data {source} does not exist; valid: a text or JSONL file, a folder, self, pg19")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--data {file} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"--data {file} cannot be read: {error.strerror}") from error


def _jsonl(file: Path) -> Iterator[str]:
    for number, line in enumerate(_text(file).splitlines(), 1):
        if not line.strip():
            continue
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
        yield record["text"]


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


def encode(texts: Iterable[str], tokenizer: Encoder, limit: int) -> list[list[int]]:
    """Token ids per document, ``limit`` tokens in all, shared evenly where documents are many."""
    documents = [list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in _up_to(texts, limit)]
    documents = [d for d in documents if d]
    total = sum(len(d) for d in documents)
    if total <= limit:
        return documents
    return [d[: max(SHORTEST, limit * len(d) // total)] for d in documents]


def _up_to(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Texts until about 16 times the limit has been seen (4 characters a token)."""
    characters = 0
    for text in texts:
        yield text
        characters += len(text)
        if characters > 64 * limit:
            return


def cut(documents: list[list[int]], block: int) -> list[list[int]]:
    """Blocks of at most ``block`` tokens, none across two documents, short remainders dropped."""
    blocks = [d[s : s + block] for d in documents for s in range(0, len(d), block)]
    return [b for b in blocks if len(b) >= min(SHORTEST, block)]


def passages(documents: list[list[int]], count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` passages of exactly ``length`` tokens at random places, spread over the documents."""
    long_enough = [d for d in documents if len(d) >= length]
    if not long_enough:
        longest = max((len(d) for d in documents), default=0)
        raise InputError(f"--data has no document of {length} tokens (the longest has {longest})")
    choose = random.Random(seed)
    weights = [len(d) for d in long_enough]
    picks = []
    for document in choose.choices(long_enough, weights, k=count):
        start = choose.randrange(len(document) - length + 1)
        picks.append(document[start : start + length])
    return picks


def check_amount(tokens: int, needed: int, source: str) -> None:
    """Raise :class:`InputError` when there is too little text to learn from."""
    if tokens == 0:
        raise InputError(f"--data {source} is empty")
    if tokens < needed:
        raise InputError(f"--data {source} has {tokens} tokens; at least {needed} are needed")
