"""Vocabularies of files held against the rows of the embedding, and against what can be built in time.

An id without a row would read foreign memory. So a vocabulary whose ids go beyond the embedding is refused
when the model is loaded: any text may give such an id. Tokens that a checkpoint in transformers' format has
*added* beyond it are not: models with a padding token and no row for it are common, and only a text that
writes its name gives its id, which `loader.prompts` refuses then. Ids that begin or end a text are held
against the rows in either case. The padding's id is not looked at: nothing here fills anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokenswift.checks import integer_of, shown
from tokenswift.loader.numbers import refusal
from tokenswift.types import InputError
from tokenswift.words import counted

#: more than any model has: tokens of a vocabulary, those among them that are no plain text, letters of one
MOST_TOKENS, MOST_SPECIAL, MOST_LETTERS = 1 << 19, 1 << 16, 1 << 12
#: sum of the squares of tokens' lengths, where merges are found by trying every cut of every token
MOST_CUTS = 1 << 26
#: a token in tiktoken's form
_RANK = re.compile(rb"[A-Za-z0-9+/=]+ \d+\s*")
#: ids that become tokens of a text, or end it
USED = ("bos", "eos", "eot", "eom", "unknown")


class _Words(msgspec.Struct):
    """What a GGUF file says of its tokenizer, behind ``tokenizer.ggml.``."""

    model: str | None = None
    pre: str | None = None
    tokens: list[str] | None = None
    token_type: list[int] | None = None
    scores: list[float] | None = None
    merges: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unknown_token_id: int | None = None
    padding_token_id: int | None = None
    add_bos_token: bool | int | None = None
    add_eos_token: bool | int | None = None
    add_space_prefix: bool | int | None = None


def check_words(metadata: Mapping[str, Any], rows: int, path: Path) -> None:
    """Refuse a GGUF file's vocabulary that does not fit its embedding, or its own lists.

    Args:
        rows: of the embedding, V.
        path: of the file, for messages.
    Raises:
        InputError: naming the value, and what is valid.
    """
    where, prefix = f"model file {path}", "tokenizer.ggml."
    said = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        words = msgspec.convert(said, _Words)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("`$.")[2].rstrip("`").partition("[")[0]
        valid = str(error).partition(" - at ")[0].removeprefix("Expected ").partition(", got")[0]
        raise refusal(where, prefix + name, said.get(name), valid.replace("`", "")) from None
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise refusal(where, "tokenizer.chat_template", template, "text")
    for name in USED:
        at = getattr(words, f"{name}_token_id")
        if at is not None and not 0 <= at < rows:
            raise refusal(where, f"{prefix}{name}_token_id", at, f"0 to {rows - 1}, a row of the embedding")
    tokens = words.tokens
    if tokens is None:
        return
    if not 0 < len(tokens) <= min(rows, MOST_TOKENS):
        most = f"{rows:,}, the rows of the embedding" if rows <= MOST_TOKENS else f"{MOST_TOKENS:,}"
        raise InputError(f"{where}: {prefix}tokens has {counted(len(tokens), 'token')}; valid: 1 to {most}")
    for name in ("token_type", "scores"):
        found = getattr(words, name)
        if found and len(found) != len(tokens):
            raise InputError(f"{where}: {prefix}{name} has {len(found):,} values; valid: {len(tokens):,}")
    if (count := sum(kind in (3, 4) for kind in words.token_type or ())) > MOST_SPECIAL:
        raise InputError(
            f"{where}: {prefix}token_type names {count:,} special tokens; valid: up to {MOST_SPECIAL:,}"
        )
    _check_letters(tokens, where, words.model == "llama")


def _check_letters(tokens: list[str], where: str, tried: bool) -> None:
    """Refuse tokens that take minutes; ``tried``: merges are found by trying every cut."""
    longest, name = max(map(len, tokens)), f"{where}: tokenizer.ggml.tokens"
    if longest > MOST_LETTERS:
        raise InputError(f"{name} has a token of {longest:,} characters; valid: up to {MOST_LETTERS:,}")
    if tried and (cuts := sum(len(token) ** 2 for token in tokens)) > MOST_CUTS:
        raise InputError(f"{name} has lengths whose squares make {cuts:,}; valid: up to {MOST_CUTS:,}")


def check_ranks(path: Path, where: str) -> None:
    """Refuse a vocabulary in tiktoken's form, a line of base64 and a rank for each token, that takes minutes:
    transformers finds its merges by trying every cut of every token. Other files are not looked at.

    Args:
        path: of a file that is not large.
        where: the file, for messages.
    Raises:
        InputError: naming how many or how long tokens are, and what is valid.
    """
    count = cuts = 0
    with path.open("rb") as file:
        for line in file:
            if count == 0 and _RANK.fullmatch(line) is None:
                return
            token = line.partition(b" ")[0]
            count += 1
            cuts += (len(token) * 3 // 4 - token.count(b"=")) ** 2
    if count > MOST_TOKENS:
        raise InputError(f"{where} has {count:,} tokens; valid: up to {MOST_TOKENS:,}")
    if cuts > MOST_CUTS:
        raise InputError(
            f"{where} has tokens with lengths whose squares make {cuts:,}; valid: up to {MOST_CUTS:,}"
        )


def check_merges(vocabulary: Path, merges: Path, where: str) -> None:
    """Refuse merges whose union is no token: the library that joins them ends in a panic where it is longer
    than every token. Files that cannot be read are their reader's affair.

    Args:
        vocabulary, merges: ``vocab.json`` and ``merges.txt`` of byte-level BPE, of files that are not large.
        where: whose they are, for messages.
    Raises:
        InputError: naming the merge, or how many there are, and what is valid.
    """
    if not vocabulary.is_file() or not merges.is_file():
        return
    try:
        tokens = json.loads(vocabulary.read_bytes())
        text = merges.read_bytes().decode()
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(tokens, dict):
        return
    if (count := text.count("\n")) > MOST_TOKENS:
        raise InputError(f"{where}: its merges.txt has {count:,} lines; valid: up to {MOST_TOKENS:,}")
    for line in text.splitlines():
        pair = line.split()
        if len(pair) == 2 and pair[0] != "#version:" and "".join(pair) not in tokens:
            raise InputError(
                f"{where}: its merges.txt joins {shown(line)} to no token of vocab.json; valid: merges whose "
                "union is a token"
            )


def check_tokenizer(tokenizer: Any, rows: int, name: str) -> None:
    """Refuse a tokenizer of transformers whose own vocabulary goes beyond the embedding.

    Args:
        rows: of the embedding, V.
        name: the model's, for messages.
    Raises:
        InputError: naming a token and its id, and what is valid.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        own = backend.get_vocab(with_added_tokens=False)
    else:
        added = getattr(tokenizer, "added_tokens_encoder", {})
        own = {token: at for token, at in tokenizer.get_vocab().items() if token not in added}
    token = max(own, key=own.__getitem__, default=None)
    if token is not None and own[token] >= rows:
        raise InputError(
            f"model {name}: its tokenizer has the token {shown(token)} with the id {own[token]}; valid: 0 to "
            f"{rows - 1}, the rows of the embedding"
        )
    for field in ("bos", "eos"):
        check_ids(getattr(tokenizer, f"{field}_token_id", None), rows, f"model {name}: its tokenizer", field)


def check_config_ids(config: Any, rows: int, where: str) -> None:
    """Refuse ids that begin or end a text and have no row in the embedding.

    Args:
        config: a config or generation config of transformers; None counts as one that names none.
        where: whose it is, for messages.
    Raises:
        InputError: naming the id, and what is valid.
    """
    for field in ("bos", "eos"):
        check_ids(getattr(config, f"{field}_token_id", None), rows, where, field)


def check_ids(ids: Any, rows: int, where: str, field: str) -> None:
    """Refuse ids of a field that are no rows of the embedding; None is none."""
    for at in ids if isinstance(ids, list | tuple) else [ids]:
        token = integer_of(at)
        if at is not None and (token is None or not 0 <= token < rows):
            raise refusal(where, f"{field}_token_id", at, f"0 to {rows - 1}, a row of the embedding")
