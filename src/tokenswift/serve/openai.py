"""Chats and completions in the forms of OpenAI's interface: finished objects, and streams of
chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from tokenswift.chat import Delta, call_id
from tokenswift.serve.answer import Answer
from tokenswift.serve.objects import (
    PING,
    QUIET,
    ChatObject,
    Choice,
    data,
    own_fields,
    usage,
    why_unfinished,
)
from tokenswift.serve.refusals import Refused

#: why a text ended → OpenAI's word for it
REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "stop"}
#: kind of a piece → its name in the deltas of a chat's stream
SPOKEN = {"text": "content", "thought": "reasoning_content"}


def object_head(answer: Answer, model: str, chunk: str = "") -> ChatObject:
    """What all objects of an answer begin with.

    Args:
        chunk: ".chunk" for those of a stream.
    """
    kind = "text_completion" if answer.body.kind == "completion" else f"chat.completion{chunk}"
    created = int(answer.record.created)
    return ChatObject(id=answer.id, object=kind, created=created, model=model)


def complete_object(answer: Answer, model: str) -> ChatObject:
    """A finished chat or completion."""
    message = answer.message
    has_calls = "tool_calls" in message
    choice = Choice(index=0, finish_reason=finish_reason(answer, has_calls), logprobs=None)
    if answer.body.kind == "chat":
        content = message["content"] or (None if has_calls else "")
        choice["message"] = {**message, "content": content, "refusal": None}
    else:
        choice["text"] = answer.text
    complete = object_head(answer, model)
    complete["choices"] = [choice]
    complete["usage"] = usage(answer)
    complete["tokenswift"] = own_fields(answer)
    return complete


def finish_reason(answer: Answer, has_calls: bool) -> str:
    """OpenAI's word for why a text ended, which may call tools."""
    return "tool_calls" if has_calls and answer.reason != "length" else REASONS[answer.reason]


# ---- streams -------------------------------------------------------------------------------------


def message_deltas(answer: Answer, deltas: Iterable[Delta]) -> list[dict[str, object]]:
    """Pieces of a text as deltas of a chat's message."""
    parts: list[dict[str, object]] = []
    for kind, text, index in deltas:
        if kind in SPOKEN:
            parts.append({SPOKEN[kind]: text})
        elif kind == "call":
            function = {"name": text, "arguments": ""}
            call = {"index": index, "id": call_id(answer.id, index), "type": "function"}
            parts.append({"tool_calls": [{**call, "function": function}]})
        elif kind == "arguments":
            parts.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return parts


class Chunks:
    """The chunks of an answer's stream.

    Args:
        answer: a chat or completion.
        model: its name for clients.

    Attributes:
        with_usage: whether the client wants the tokens counted, in a chunk of their own.
        has_calls: whether a tool is called in what has come so far.
    """

    def __init__(self, answer: Answer, model: str) -> None:
        self._answer = answer
        self._is_chat = answer.body.kind == "chat"
        self._head = object_head(answer, model, ".chunk")
        self._parser = answer.calls.parser()
        self.with_usage = bool(answer.body.settings_of("stream_options").get("include_usage"))
        self.has_calls = False

    def first(self) -> list[bytes]:
        """What a stream begins with."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._is_chat else []

    def of_text(self, text: str) -> list[bytes]:
        """More of the text."""
        return self._of_deltas(self._parser.push(text))

    def last(self) -> list[bytes]:
        """The end of a finished answer: what was held back, why it ended, its tokens."""
        answer = self._answer
        chunks = self._of_deltas([*self._parser.push(answer.tail), *self._parser.finish()])
        chunks.append(self._chunk({}, finish_reason(answer, self.has_calls)))
        if self.with_usage:
            counts: ChatObject = {**self._head, "choices": [], "usage": usage(answer)}
            counts["tokenswift"] = own_fields(answer)
            chunks.append(data(counts))
        chunks.append(b"data: [DONE]\n\n")
        return chunks

    def _of_deltas(self, deltas: Iterable[Delta]) -> list[bytes]:
        parts = message_deltas(self._answer, deltas)
        self.has_calls |= any("tool_calls" in part for part in parts)
        return [self._chunk(part) for part in parts]

    def _chunk(self, delta: dict[str, object], reason: str | None = None) -> bytes:
        choice = Choice(index=0, finish_reason=reason, logprobs=None)
        if self._is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = str(delta.get("content", ""))
        chunk: ChatObject = {**self._head, "choices": [choice]}
        if self.with_usage:
            chunk["usage"] = None
        return data(chunk)


async def stream_chunks(answer: Answer, model: str) -> AsyncIterator[bytes]:
    """A stream of a chat or completion."""
    chunks = Chunks(answer, model)
    yield PING  # the headers are out before the prompt is read
    for chunk in chunks.first():
        yield chunk
    async for stretch in answer.follow(QUIET):
        if stretch is None:
            yield PING
            continue
        start, end = stretch
        for chunk in chunks.of_text("".join(answer.pieces[start:end])):
            yield chunk
    if not answer.reason:
        yield data(Refused(answer.status, why_unfinished(answer), code="stopped").body)
        return
    for chunk in chunks.last():
        yield chunk
