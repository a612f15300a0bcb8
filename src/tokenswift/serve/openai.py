"""Chats and completions in the forms of OpenAI's interface: finished objects, and streams of
chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import accumulate, chain

import msgspec

from tokenswift.chat import Delta, call_id
from tokenswift.serve.answer import GRAMMAR, Answer, follow_all
from tokenswift.serve.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
    joined_logprobs,
    prompt_offsets,
)
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
REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "stop", GRAMMAR: "length"}
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


def complete_object(answers: Sequence[Answer], model: str) -> ChatObject:
    """A finished chat or completion."""
    complete = object_head(answers[0], model)
    complete["choices"] = [_complete_choice(*numbered) for numbered in enumerate(answers)]
    if len(answers) > 1:
        for choice, answer in zip(complete["choices"], answers, strict=True):
            choice["tokenswift"] = own_fields(answer)
    complete["usage"] = usage(*answers)
    complete["tokenswift"] = own_fields(answers[0])
    return complete


def complete_json(answers: Sequence[Answer], model: str) -> bytes:
    """`complete_object`, as it is sent."""
    return msgspec.json.encode(complete_object(answers, model))


def _complete_choice(number: int, answer: Answer) -> Choice:
    """A text of a finished chat or completion."""
    message = answer.message
    has_calls = "tool_calls" in message
    choice = Choice(index=number, finish_reason=finish_reason(answer, has_calls), logprobs=None)
    if answer.body.kind == "chat":
        content = message["content"] or (None if has_calls else "")
        choice["message"] = {**message, "content": content, "refusal": None}
        choice["logprobs"] = _logprobs(answer, 0, len(answer.pieces))
        return choice
    choice["text"] = answer.echo + answer.text
    echoed = _echoed_logprobs(answer)
    written = _completion_logprobs(answer, 0, len(answer.pieces))
    if echoed is not None and written is not None:
        choice["logprobs"] = joined_logprobs(echoed, written)
    else:
        choice["logprobs"] = echoed or written
    return choice


def _logprobs(answer: Answer, start: int, end: int) -> ChatLogprobs | CompletionLogprobs | None:
    """Log-probabilities of some of the new tokens, where they are asked for."""
    if answer.body.kind != "chat":
        return _completion_logprobs(answer, start, end)
    if not answer.tokens:
        return None
    return chat_logprobs(answer.token_texts, answer.tokens[start:end], answer.logprobs[start:end])


def _completion_logprobs(answer: Answer, start: int, end: int) -> CompletionLogprobs | None:
    """The same of a completion, with the place of each token in the text."""
    if not answer.tokens:
        return None
    place = len(answer.echo) + sum(map(len, answer.pieces[:start]))
    offsets = list(accumulate(map(len, answer.pieces[start:end]), initial=place))[:-1]
    tokens = answer.tokens[start:end]
    return completion_logprobs(answer.token_texts, tokens, answer.logprobs[start:end], offsets)


def _echoed_logprobs(answer: Answer) -> CompletionLogprobs | None:
    """Log-probabilities of the prompt, where it is echoed with them."""
    if not answer.prompt_logprobs:
        return None
    texts = answer.token_texts
    offsets = prompt_offsets(texts, answer.prompt, answer.echo)
    return completion_logprobs(texts, answer.prompt, answer.prompt_logprobs, offsets)


def finish_reason(answer: Answer, has_calls: bool) -> str:
    """OpenAI's word for why a text ended, which may call tools."""
    reason = REASONS[answer.reason]
    return "tool_calls" if has_calls and reason != "length" else reason


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
    """The chunks of one text of a stream.

    Args:
        answer: a chat or completion.
        head: what all chunks of the stream begin with.
        number: of the text among those of the stream.

    Attributes:
        with_usage: whether the client wants the tokens counted, in a chunk of their own.
        has_calls: whether a tool is called in what has come so far.
    """

    def __init__(self, answer: Answer, head: ChatObject, number: int) -> None:
        self._answer = answer
        self._is_chat = answer.body.kind == "chat"
        self._head = head
        self._number = number
        self._parser = answer.calls.parser()
        self._is_echoed = self._is_chat
        self.with_usage = bool(answer.body.settings_of("stream_options").get("include_usage"))
        self.has_calls = False

    def first(self) -> list[bytes]:
        """What a text begins with."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._is_chat else []

    def of_stretch(self, start: int, end: int) -> list[bytes]:
        """More of the text: that of some tokens."""
        answer = self._answer
        deltas = self._parser.push("".join(answer.pieces[start:end]))
        return [*self._echo(), *self._of_deltas(deltas, _logprobs(answer, start, end))]

    def last(self) -> list[bytes]:
        """The end of a finished text: what was held back, and why it ended."""
        answer = self._answer
        deltas = [*self._parser.push(answer.tail), *self._parser.finish()]
        chunks = [*self._echo(), *self._of_deltas(deltas, None)]
        chunks.append(self._chunk({}, finish_reason(answer, self.has_calls)))
        return chunks

    def _echo(self) -> list[bytes]:
        """The prompt, where it is to be echoed, before the first text."""
        answer = self._answer
        if self._is_echoed or not answer.echo:
            return []
        self._is_echoed = True
        return [self._chunk({"content": answer.echo}, logprobs=_echoed_logprobs(answer))]

    def _of_deltas(
        self, deltas: Iterable[Delta], logprobs: ChatLogprobs | CompletionLogprobs | None
    ) -> list[bytes]:
        """Chunks of some pieces, the first of them with the log-probabilities of the tokens that
        they came with."""
        parts = message_deltas(self._answer, deltas)
        self.has_calls |= any("tool_calls" in part for part in parts)
        if logprobs is not None and not parts:
            parts.append({"content": ""})  # their text is held back
        return [
            self._chunk(part, logprobs=None if number else logprobs)
            for number, part in enumerate(parts)
        ]

    def _chunk(
        self,
        delta: dict[str, object],
        reason: str | None = None,
        logprobs: ChatLogprobs | CompletionLogprobs | None = None,
    ) -> bytes:
        choice = Choice(index=self._number, finish_reason=reason, logprobs=logprobs)
        if reason is not None and self._answer.reason == GRAMMAR:
            choice["tokenswift"] = own_fields(self._answer)
        if self._is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = str(delta.get("content", ""))
        chunk: ChatObject = {**self._head, "choices": [choice]}
        if self.with_usage:
            chunk["usage"] = None
        return data(chunk)


async def stream_chunks(answers: Sequence[Answer], model: str) -> AsyncIterator[bytes]:
    """A stream of a chat or completion."""
    head = object_head(answers[0], model, ".chunk")
    texts = [Chunks(answer, head, number) for number, answer in enumerate(answers)]
    yield PING  # the headers are out before the prompt is read
    for chunk in chain.from_iterable(text.first() for text in texts):
        yield chunk
    async for news in follow_all(answers, QUIET):
        answer = answers[news.number]
        if news.stretch is not None:
            chunks = texts[news.number].of_stretch(*news.stretch)
        elif not news.is_over:
            chunks = [PING]
        elif answer.reason:
            chunks = texts[news.number].last()
        else:
            yield data(Refused(answer.status, why_unfinished(answer), code="stopped").body)
            return
        for chunk in chunks:
            yield chunk
    if texts[0].with_usage:
        counts: ChatObject = {**head, "choices": [], "usage": usage(*answers)}
        counts["tokenswift"] = own_fields(answers[0])
        yield data(counts)
    yield b"data: [DONE]\n\n"
