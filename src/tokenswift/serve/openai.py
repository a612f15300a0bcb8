"""Chats and completions in the forms of OpenAI's interface: whole objects, and streams of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import msgspec

from tokenswift.chat.parser import Delta
from tokenswift.serve.answers import Answer, Part
from tokenswift.serve.errors import error_body

PING = b": ping\n\n"
LEAST = -9999.0  # in place of minus infinity, for which JSON has no number; vLLM's
#: why a text ended → OpenAI's word for it
REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "stop"}


def data(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# ---- what all answers tell ----------------------------------------------------------------------


def usage(answer: Answer) -> dict[str, int]:
    """Tokens; a prompt counts once, however many texts follow it."""
    prompt = sum(part.prompt_tokens for part in answer.parts[:: max(1, answer.body.choices)])
    new = sum(len(part.pieces) for part in answer.parts)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def own(answer: Answer) -> dict[str, Any]:
    """What OpenAI's interface has no word for."""
    steps = sum(len(part.steps) for part in answer.parts)
    new = sum(len(part.pieces) for part in answer.parts)
    return {
        "seed": answer.record.seed if answer.body.seed in (None, -1) else answer.body.seed,
        "ended_by": [part.reason for part in answer.parts],
        "steps": steps,
        "tokens_a_step": round(new / steps, 3) if steps else 0.0,
    }


def details(part: Part, start: int, end: int) -> dict[str, Any]:
    """Of tokens from ``start`` to ``end``: who drafted each, their characters, the steps ended there."""
    steps: list[tuple[int, float]] = []
    at = len(part.pieces)
    for size, milliseconds in reversed(part.steps):
        if at <= start:
            break
        if at <= end:
            steps.append((size, milliseconds))
        at -= size
    return {
        "position": end,
        "sources": "".join(part.letters[start:end]),
        "chars": [len(piece) for piece in part.pieces[start:end]],
        "steps": steps[::-1],
    }


def unfinished(answer: Answer) -> str:
    """Why an answer is not whole, in one line."""
    return answer.record.error or answer.stopped or "it was stopped"


def logprobs(answer: Answer, part: Part, start: int = 0, end: int | None = None) -> dict[str, Any] | None:
    """Of tokens from ``start`` to ``end``, as chats or completions have them; None where nobody asked."""
    if answer.body.likely is None:
        return None
    told, chat = part.logprobs[start:end], answer.record.kind == "chat"

    def one(token: int, value: float | None) -> dict[str, Any]:
        spelt = answer.spell(token)
        value = None if value is None else max(value, LEAST)
        return {"token": spelt.decode(errors="replace"), "logprob": value, "bytes": list(spelt)}

    content = [one(token, each and each.logprob) for token, _, each in told]
    tops = [[one(*other) for other in (each.top if each else ())] for _, _, each in told]
    if chat:
        content = [{**its, "top_logprobs": top} for its, top in zip(content, tops, strict=True)]
        return {"content": content, "refusal": None}
    listed = [
        {found["token"]: found["logprob"] for found in (its, *reversed(top))}  # of tokens alike the likeliest
        for its, top in zip(content, tops, strict=True)
    ]
    return {
        "tokens": [its["token"] for its in content],
        "token_logprobs": [its["logprob"] for its in content],
        "top_logprobs": listed,
        "text_offset": [place for _, place, _ in told],
    }


# ---- whole answers ------------------------------------------------------------------------------


def head(answer: Answer, model: str, chunk: bool = False) -> dict[str, Any]:
    """What all objects of an answer begin with."""
    kind = "text_completion" if answer.record.kind == "completion" else "chat.completion"
    kind += ".chunk" if chunk and kind != "text_completion" else ""
    return {"id": answer.id, "object": kind, "created": answer.record.created, "model": model}


def whole(answer: Answer, model: str) -> dict[str, Any]:
    """A finished answer."""
    choices: list[dict[str, Any]] = []
    said: dict[str, Any]
    for part in answer.parts:
        said, message = {"text": part.text}, answer.message(part)
        if answer.record.kind == "chat":
            content = message["content"] or (None if "tool_calls" in message else "")
            said = {"message": {**message, "content": content, "refusal": None}}
        likely = logprobs(answer, part, 0, part.told())
        more = {"finish_reason": ended(part, "tool_calls" in message), "logprobs": likely}
        choices.append({"index": part.index, **said, **more})
    return {**head(answer, model), "choices": choices, "usage": usage(answer), "tokenswift": own(answer)}


def ended(part: Part, calls: bool) -> str:
    """OpenAI's word for why a text ended, which may call tools."""
    return "tool_calls" if calls and part.reason != "length" else REASONS[part.reason]


# ---- streams ------------------------------------------------------------------------------------


def told(answer: Answer, part: Part, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """Pieces of a text as deltas of a chat's stream; text that stands in a row is one."""
    made: list[dict[str, Any]] = []
    for delta in deltas:
        function: dict[str, str] = {"arguments": delta.text}
        call: dict[str, Any] = {"index": delta.index, "function": function}
        if delta.kind in ("text", "thought"):
            name = "content" if delta.kind == "text" else "reasoning_content"
            before = made.pop()[name] if made and name in made[-1] else ""
            made.append({name: before + delta.text})
        elif delta.kind == "call":
            function |= {"name": delta.text, "arguments": ""}
            call |= {"id": answer.call_id(part, delta.index), "type": "function"}
            made.append({"tool_calls": [call]})
        elif delta.kind == "arguments":
            made.append({"tool_calls": [call]})
    return made


class Chunks:
    """The events of one text of a stream.

    Args:
        answer: the answer.
        part: the text.
        head: what each event begins with.
    """

    def __init__(self, answer: Answer, part: Part, head: dict[str, Any]) -> None:
        self._answer, self._part, self._head = answer, part, head
        self._parser, self._called, self._likely = answer.calls.parser(), False, 0
        self._chat = answer.record.kind == "chat"

    def event(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        """An event."""
        said = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice = {"index": self._part.index, "finish_reason": reason, "logprobs": more.pop("logprobs", None)}
        return data({**self._head, "choices": [{**choice, **said}], **more})

    def new(self, text: str, last: bool = False, **more: Any) -> Iterator[bytes]:
        """The events of more text, the first with what is told of its tokens."""
        deltas = [*self._parser.push(text), *(self._parser.finish() if last else ())]
        self._called |= any(delta.kind == "call" for delta in deltas)
        found, start = told(self._answer, self._part, deltas), self._likely
        self._likely = self._part.told(start)
        if self._likely > start and self._answer.body.likely is not None:
            more["logprobs"] = logprobs(self._answer, self._part, start, self._likely)
        for delta in found or ([{}] if more else []):
            yield self.event(delta, **more)
            more = {}

    def end(self) -> bytes:
        """The event of the text's end."""
        return self.event({}, ended(self._part, self._called))


async def chunks(answer: Answer, model: str, ping: float) -> AsyncIterator[bytes]:
    """A stream of chat or completion."""
    with_usage = bool((answer.body.given("stream_options") or {}).get("include_usage"))
    begun = head(answer, model, chunk=True)
    texts = [Chunks(answer, part, begun | ({"usage": None} if with_usage else {})) for part in answer.parts]
    yield PING  # the headers are out before the prompt is read
    for text in texts if answer.record.kind == "chat" else ():
        yield text.event({"role": "assistant", "content": ""})
    async for found in answer.follow(ping):
        if found is None:
            yield PING
            continue
        part, start, end = found
        more = {"tokenswift": details(part, start, end)} if answer.body.own.get("details") else {}
        for value in texts[part.index].new("".join(part.pieces[start:end]), False, **more):
            yield value
    if not all(part.reason for part in answer.parts):
        yield data(error_body(unfinished(answer), answer.status, code="stopped"))
        return
    for part, text in zip(answer.parts, texts, strict=True):
        for value in text.new(part.tail, last=True):
            yield value
        yield text.end()
    if with_usage:
        yield data({**begun, "choices": [], "usage": usage(answer), "tokenswift": own(answer)})
    yield b"data: [DONE]\n\n"
