"""Objects of OpenAI's interface that answers are sent as, and what all of them tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

import msgspec

from tokenswift.serve.answer import GRAMMAR, Answer
from tokenswift.serve.logprobs import ChatLogprobs, CompletionLogprobs

PING = b": ping\n\n"  # a comment
QUIET = 15.0  # seconds without text after which a stream gets one, which keeps the connection open


class Usage(TypedDict):
    """Tokens of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class OwnFields(TypedDict):
    """What OpenAI's interface has no word for."""

    seed: int
    ended_by: str
    steps: int
    error: NotRequired[str]


class Choice(TypedDict):
    """A text of a chat or completion; a chunk of a chat has a ``delta`` of its message."""

    index: int
    message: NotRequired[dict[str, object]]
    delta: NotRequired[dict[str, object]]
    text: NotRequired[str]
    finish_reason: str | None
    logprobs: ChatLogprobs | CompletionLogprobs | None
    tokenswift: NotRequired[OwnFields]


class ChatObject(TypedDict):
    """A chat or completion, or a chunk of one; ``usage`` is None in all chunks but the last."""

    id: str
    object: str
    created: int
    model: str
    choices: NotRequired[list[Choice]]
    usage: NotRequired[Usage | None]
    tokenswift: NotRequired[OwnFields]


class OutputText(TypedDict):
    """A part of a response's message."""

    type: str
    text: str
    annotations: list[object]
    logprobs: list[object]


class ShownTools(TypedDict):
    """The tools of a request, as its response has them."""

    parallel_tool_calls: bool
    tool_choice: str | dict[str, str]
    tools: list[dict[str, object]]


def data(value: Mapping[str, object]) -> bytes:
    """An event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def own_fields(answer: Answer) -> OwnFields:
    """The seed of an answer, why it ended ("" before) and how many passes it took; the error of a
    grammar that ended it."""
    fields = OwnFields(
        seed=answer.body.sampler_seed(answer.record.seed),
        ended_by=answer.reason,
        steps=answer.steps,
    )
    if answer.reason == GRAMMAR:
        fields["error"] = answer.record.error
    return fields


def usage(*answers: Answer) -> Usage:
    """The tokens of answers so far; those of a prompt are counted once, however many texts it
    has."""
    prompt_tokens = sum(answer.record.prompt_tokens for answer in answers if not answer.body.sample)
    new_tokens = sum(len(answer.pieces) for answer in answers)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=new_tokens,
        total_tokens=prompt_tokens + new_tokens,
    )


def why_unfinished(answer: Answer) -> str:
    """Why an answer is not complete, in one line."""
    stopped = "it was stopped" if answer.done else "the server is shutting down"
    return answer.record.error or stopped


def output_text(text: str) -> OutputText:
    """A part of a response's message."""
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])
