"""Prompts as answers tell of them: their text, and how likely their tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.engine.request import Request
from tokenswift.engine.text import TextStream
from tokenswift.loader.prompts import Prompt
from tokenswift.serve.schemas import Body
from tokenswift.types import Logprob

LEAST = -9999.0  # in place of minus infinity, for which JSON has no number; vLLM's

#: a token's bytes, its place in the text, log-probability (None: nothing stands before it), and bytes and
#: log-probabilities of the likeliest tokens there
Told = tuple[bytes, int, float | None, list[tuple[bytes, float]]]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt.

    Attributes:
        tokens: ids.
        text: as it was given, or of the ids.
        places: where in the text each token begins.
    """

    tokens: tuple[int, ...]
    text: str
    places: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> Echo:
        """The echo of a prompt that has these ids. Special tokens that its text begins with without having
        them are at place 0."""
        stream = TextStream(tokenizer)
        places, whole = [], ""
        for token in tokens:
            places.append(len(whole))
            whole += stream.push((token,))
        whole += stream.finish()
        text = prompt if isinstance(prompt, str) else whole
        more = len(whole) - len(text) if whole.endswith(text) else 0
        return cls(tuple(tokens), text, tuple(min(max(0, at - more), len(text)) for at in places))


def echoes(body: Body, requests: Sequence[Request], tokenizer: Any) -> list[Echo | None]:
    """Of each text's prompt; None where a body does not ask to be told of it."""
    if body.prompt_likely is None and not body.echoes:
        return [None] * len(requests)
    each, prompts = body.choices, body.prompts(True, ())
    made = [Echo.of(p, requests[i * each].prompt, tokenizer) for i, p in enumerate(prompts)]  # type: ignore[arg-type]
    return [made[i // each] for i in range(len(requests))]


def token_told(
    token: int, place: int, found: Logprob | None, spell: Callable[[int], bytes], top: int | None = None
) -> Told:
    """What a text tells of one of its tokens."""
    if found is None:
        return spell(token), place, None, []
    others = [(spell(other), value) for other, value in found.top[:top]]
    return spell(token), place, max(found.logprob, LEAST), others


def ranked(
    tokens: Sequence[int], found: Sequence[Logprob | None], spell: Callable[[int], bytes], top: int
) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities in vLLM's form: of each token by its id, and of the likeliest ones."""

    def one(token: int, value: float, rank: int) -> dict[str, Any]:
        said = spell(token).decode(errors="replace")
        return {"logprob": max(value, LEAST), "rank": rank, "decoded_token": said}

    made: list[dict[str, Any] | None] = []
    for token, each in zip(tokens, found, strict=True):
        if each is None:
            made.append(None)
            continue
        best = {str(t): one(t, value, i) for i, (t, value) in enumerate(each.top[:top], 1)}
        made.append({str(token): one(token, each.logprob, each.rank)} | best)
    return made
