"""Chats and completions in the forms of OpenAI's interface: whole objects, and streams of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from tokenswift.chat import Delta, call_id
from tokenswift.serve.answers import Answer
from tokenswift.serve.guard import error_body

PING = b": ping\n\n"
#: why a text ended → OpenAI's word for it
REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "stop"}


def data(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# ---- what all answers tell ----------------------------------------------------------------------


def usage(answer: Answer) -> dict[str, int]:
    """Tokens."""
    prompt, new = answer.record.prompt_tokens, len(answer.pieces)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def own(answer: Answer) -> dict[str, Any]:
    """What OpenAI's interface has no word for."""
    seed = answer.record.seed if answer.body.seed in (None, -1) else answer.body.seed
    return {"seed": seed, "ended_by": answer.reason, "steps": len(answer.steps)}


def details(answer: Answer, start: int, end: int) -> dict[str, Any]:
    """Of tokens from ``start`` to ``end``: who drafted each, their characters, the steps ended there."""
    steps: list[tuple[int, float]] = []
    at = len(answer.pieces)
    for size, milliseconds in reversed(answer.steps):
        if at <= start:
            break
        if at <= end:
            steps.append((size, milliseconds))
        at -= size
    return {
        "position": end,
        "sources": "".join(answer.letters[start:end]),
        "chars": [len(piece) for piece in answer.pieces[start:end]],
        "steps": steps[::-1],
    }


def unfinished(answer: Answer) -> str:
    """Why an answer is not whole, in one line."""
    stopped = "it was stopped" if answer.done else "the server is shutting down"
    return answer.record.error or stopped


# ---- whole answers ------------------------------------------------------------------------------


def head(answer: Answer, model: str, chunk: bool = False) -> dict[str, Any]:
    """What all objects of an answer begin with."""
    kind = "text_completion" if answer.body.kind == "completion" else "chat.completion"
    kind += ".chunk" if chunk and kind != "text_completion" else ""
    return {"id": answer.id, "object": kind, "created": answer.record.created, "model": model}


def whole(answer: Answer, model: str) -> dict[str, Any]:
    """A finished answer."""
    said: dict[str, Any] = {"text": answer.text}
    message = answer.message
    if answer.body.kind == "chat":
        content = message["content"] or (None if "tool_calls" in message else "")
        said = {"message": {**message, "content": content, "refusal": None}}
    reason = ended(answer, "tool_calls" in message)
    choice = {"index": 0, **said, "finish_reason": reason, "logprobs": None}
    return {**head(answer, model), "choices": [choice], "usage": usage(answer), "tokenswift": own(answer)}


def ended(answer: Answer, calls: bool) -> str:
    """OpenAI's word for why a text ended, which may call tools."""
    return "tool_calls" if calls and answer.reason != "length" else REASONS[answer.reason]


# ---- streams ------------------------------------------------------------------------------------


def told(answer: Answer, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
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
            call |= {"id": call_id(answer.id, delta.index), "type": "function"}
            made.append({"tool_calls": [call]})
        elif delta.kind == "arguments":
            made.append({"tool_calls": [call]})
    return made


async def chunks(answer: Answer, model: str, ping: float) -> AsyncIterator[bytes]:
    """A stream of chat or completion."""
    with_usage = bool((answer.body.given("stream_options") or {}).get("include_usage"))
    begun, parser, calls = head(answer, model, chunk=True), answer.calls.parser(), False

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        said = {"delta": delta} if answer.body.kind == "chat" else {"text": delta.get("content", "")}
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, **said}
        more |= {"usage": None} if with_usage else {}
        return data({**begun, "choices": [choice], **more})

    yield PING  # the headers are out before the prompt is read
    if answer.body.kind == "chat":
        yield chunk({"role": "assistant", "content": ""})
    async for found in answer.follow(ping):
        if found is None:
            yield PING
            continue
        deltas = parser.push("".join(answer.pieces[slice(*found)]))
        calls |= any(delta.kind == "call" for delta in deltas)
        told_of = answer.body.own.get("details")
        more: dict[str, Any] = {"tokenswift": details(answer, *found)} if told_of else {}
        for delta in told(answer, deltas) or ([{}] if more else []):
            yield chunk(delta, **more)
            more = {}
    if not answer.reason:
        yield data(error_body(unfinished(answer), answer.status, code="stopped"))
        return
    deltas = [*parser.push(answer.tail), *parser.finish()]
    for delta in told(answer, deltas):
        yield chunk(delta)
    yield chunk({}, ended(answer, calls or any(delta.kind == "call" for delta in deltas)))
    if with_usage:
        yield data({**begun, "choices": [], "usage": usage(answer), "tokenswift": own(answer)})
    yield b"data: [DONE]\n\n"
