"""Log-probabilities in the forms of OpenAI's interface."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TypedDict

from tokenswift.serve.token_texts import TokenTexts
from tokenswift.types import Logprob

LEAST = -9999.0  # stands for a probability of 0, which JSON has no number for


class TopLogprob(TypedDict):
    """A token of a chat and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The same of a token of the text, with the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion's tokens; None for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], records: Sequence[Logprob]
) -> ChatLogprobs:
    """Log-probabilities of some tokens of a chat."""
    content: list[TokenLogprob] = []
    for token, record in zip(tokens, records, strict=True):
        likeliest = [_named(texts, other, value) for other, value in record.top]
        named = _named(texts, token, record.logprob)
        content.append(TokenLogprob(**named, top_logprobs=likeliest))
    return ChatLogprobs(content=content, refusal=None)


def _named(texts: TokenTexts, token: int, logprob: float) -> TopLogprob:
    """A token by its text."""
    data = texts.bytes_of(token)
    value = max(logprob, LEAST)
    return TopLogprob(token=data.decode(errors="replace"), logprob=value, bytes=list(data))


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    records: Sequence[Logprob | None],
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """Log-probabilities of some tokens of a completion, or of its prompt.

    Args:
        offsets: where each token's text begins.
    """
    tops: list[dict[str, float] | None] = []
    for token, record in zip(tokens, records, strict=True):
        if record is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for other, value in (*record.top, (token, record.logprob)):
            top.setdefault(texts.text_of(other), max(value, LEAST))
        tops.append(top)
    return CompletionLogprobs(
        tokens=[texts.text_of(token) for token in tokens],
        token_logprobs=[None if one is None else max(one.logprob, LEAST) for one in records],
        top_logprobs=tops,
        text_offset=list(offsets),
    )


def prompt_offsets(texts: TokenTexts, tokens: Sequence[int], prompt: str) -> list[int]:
    """Where the text of each token of a prompt begins in it; tokens that a tokenizer puts before a
    text have no text of their own."""
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    offsets: list[int] = []
    place = 0
    for token in tokens:
        offsets.append(place)
        text = decoder.decode(texts.bytes_of(token))
        if prompt.startswith(text, place):
            place += len(text)
    return offsets


def joined_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Those of a prompt and of the text after it."""
    return CompletionLogprobs(
        tokens=first["tokens"] + second["tokens"],
        token_logprobs=first["token_logprobs"] + second["token_logprobs"],
        top_logprobs=first["top_logprobs"] + second["top_logprobs"],
        text_offset=first["text_offset"] + second["text_offset"],
    )
