"""Answers in the forms of OpenAI's interface: whole objects, and streams of events.

A stream of ``/v1/responses`` numbers its events by tokens: created 0, in progress 1, the item 2, its part 3,
text up to token t 3 + t, then what the end released, and the events of the end. So ``starting_after`` names
a place in the text, and means the same after a restart of the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from tokenswift.serve.answer import Answer, Part
from tokenswift.serve.answers import CANCELLED, ENDS
from tokenswift.serve.errors import error_body

BEFORE = 3  # number of the last event before the first token
PING = b": ping\n\n"
encode = msgspec.json.encode
#: why a text ended → OpenAI's word for it
REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "stop"}


def data(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """An event that has a name."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


# ---- chat and completions -----------------------------------------------------------------------


def head(answer: Answer, model: str, chunk: bool = False) -> dict[str, Any]:
    """What all objects of an answer begin with."""
    kind = "text_completion" if answer.record.kind == "completion" else "chat.completion"
    kind += ".chunk" if chunk and kind != "text_completion" else ""
    return {"id": answer.id, "object": kind, "created": answer.record.created, "model": model}


def usage(answer: Answer) -> dict[str, int]:
    """Tokens; a prompt counts once, however many texts follow it."""
    each = max(1, getattr(answer.body, "choices", 1))
    prompt = sum(part.prompt_tokens for part in answer.parts[::each])
    new = sum(len(part.pieces) for part in answer.parts)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def own(answer: Answer) -> dict[str, Any]:
    """What OpenAI's interface has no word for."""
    steps = sum(len(part.steps) for part in answer.parts)
    new = sum(len(part.pieces) for part in answer.parts)
    return {
        "seed": answer.body.seed if answer.body.seed is not None else answer.record.seed,
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


def likely(part: Part, start: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """Log-probabilities of tokens from ``start`` to ``end``, as chats and responses have them."""

    def one(token: bytes, value: float) -> dict[str, Any]:
        return {"token": token.decode(errors="replace"), "logprob": value, "bytes": list(token)}

    return [
        {**one(token, value), "top_logprobs": [one(*other) for other in top]}
        for token, _, value, top in part.logprobs[start:end]
    ]


def logprobs(answer: Answer, part: Part, start: int = 0, end: int | None = None) -> dict[str, Any] | None:
    """The same of a chat or completion; None where nobody asked."""
    if answer.body.likely is None:
        return None
    if answer.record.kind == "chat":
        return {"content": likely(part, start, end), "refusal": None}
    found = part.logprobs[start:end]
    return {
        "tokens": [token.decode(errors="replace") for token, _, _, _ in found],
        "token_logprobs": [value for _, _, value, _ in found],
        "top_logprobs": [{token.decode(errors="replace"): v for token, v in top} for _, _, _, top in found],
        "text_offset": [place for _, place, _, _ in found],
    }


def whole(answer: Answer, model: str) -> dict[str, Any]:
    """A finished answer."""
    chat = answer.record.kind == "chat"
    choices: list[dict[str, Any]] = []
    for part in answer.parts:
        said = {"message": {"role": "assistant", "content": part.text}} if chat else {"text": part.text}
        reason = {"finish_reason": REASONS[part.reason], "logprobs": logprobs(answer, part)}
        choices.append({"index": part.index, **said, **reason})
    return {**head(answer, model), "choices": choices, "usage": usage(answer), "tokenswift": own(answer)}


async def chunks(answer: Answer, model: str, ping: float) -> AsyncIterator[bytes]:
    """A stream of chat or completion."""
    chat, first = answer.record.kind == "chat", head(answer, model, chunk=True)
    options = getattr(answer.body, "stream_options", None)
    with_usage = options is not None and bool(options.include_usage)
    nothing: dict[str, Any] = {"usage": None} if with_usage else {}
    detailed = answer.body.own.details

    def chunk(part: Part, said: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": part.index, "finish_reason": reason, "logprobs": None, **said}
        return data({**first, "choices": [choice], **nothing, **more})

    def text(new: str) -> dict[str, Any]:
        return {"delta": {"content": new}} if chat else {"text": new}

    yield PING  # the headers are out before the prompt is read
    for part in answer.parts if chat else ():
        yield chunk(part, {"delta": {"role": "assistant", "content": ""}})
    async for found in answer.follow(0, ping):
        if found is None:
            yield PING
            continue
        part, start, end = found
        more = {"tokenswift": details(part, start, end)} if detailed else {}
        said = {**text("".join(part.pieces[start:end])), "logprobs": logprobs(answer, part, start, end)}
        yield chunk(part, said, None, **more)
    if not all(part.reason for part in answer.parts):
        yield data(error_body(unfinished(answer), 500, code="stopped"))
        return
    for part in answer.parts:
        if part.tail:
            yield chunk(part, text(part.tail))
        yield chunk(part, {"delta": {}} if chat else {"text": ""}, REASONS[part.reason])
    if with_usage:
        yield data({**first, "choices": [], "usage": usage(answer), "tokenswift": own(answer)})
    yield b"data: [DONE]\n\n"


def unfinished(answer: Answer) -> str:
    """Why an answer is not whole, in one line."""
    return answer.record.error or answer.stopped or "it was stopped"


# ---- responses ----------------------------------------------------------------------------------


def status(answer: Answer) -> str:
    """OpenAI's word for where an answer stands."""
    if answer.record.state == "done":
        cut = any(part.reason == "length" for part in answer.parts)
        return "incomplete" if cut else "completed"
    if answer.record.state != "open":
        return answer.record.state
    if not answer.running:
        if answer.stopped == CANCELLED:
            return "cancelled"
        goes_on = answer.background and (not answer.stopped or (answer.kept and answer.stopped == ENDS))
        return "queued" if goes_on else "incomplete"
    return "in_progress" if any(part.pieces for part in answer.parts) else "queued"


def item(answer: Answer, part: Part, state: str) -> dict[str, Any]:
    """The message of one text."""
    content = [] if state == "in_progress" else [output_text(part.text, likely(part))]
    name = f"msg_{answer.id.partition('_')[2]}_{part.index}"
    return {"id": name, "type": "message", "role": "assistant", "status": state, "content": content}


def output_text(text: str, found: Sequence[Any] = ()) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}


def response(answer: Answer, model: str, state: str | None = None) -> dict[str, Any]:
    """The object of ``/v1/responses``; with ``state``, as it was then, before any text."""
    body: Any = answer.body
    now = status(answer) if state is None else state
    outputs = answer.parts if state is None else ()
    counts = usage(answer)
    cut = now == "incomplete" and answer.record.state == "done"
    failed = answer.record.state == "failed" and state is None
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.record.created,
        "completed_at": answer.over_at if now == "completed" else None,
        "status": now,
        "background": answer.background,
        "error": {"code": "server_error", "message": answer.record.error} if failed else None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [item(answer, part, "completed" if part.reason else "incomplete") for part in outputs],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None
        if state is not None or answer.record.state == "open"
        else {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
        "tokenswift": own(answer),
    }


async def events(answer: Answer, model: str, after: int, ping: float) -> AsyncIterator[bytes]:
    """A stream of ``/v1/responses``: the events whose number is greater than ``after``."""
    part = answer.parts[0]
    place = {"item_id": item(answer, part, "in_progress")["id"], "output_index": 0, "content_index": 0}

    def numbered(first: int, values: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        for number, value in enumerate(values, first):
            if number > after:
                yield event({**value, "sequence_number": number})

    yield PING  # the headers are out before the prompt is read
    before = [
        {"type": "response.created", "response": response(answer, model, "queued")},
        {"type": "response.in_progress", "response": response(answer, model, "in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": item(answer, part, "in_progress")},
        {"type": "response.content_part.added", **place, "part": output_text("")},
    ]
    for line in numbered(0, before):
        yield line
    delta = {"type": "response.output_text.delta", **place, "logprobs": []}
    async for found in answer.follow(max(0, after - BEFORE), ping):
        if found is None:
            yield PING
            continue
        _, start, end = found
        more = {"tokenswift": details(part, start, end)} if answer.body.own.details else {}
        said = {"delta": "".join(part.pieces[start:end]), "logprobs": likely(part, start, end)}
        yield event({**delta, **said, "sequence_number": BEFORE + end, **more})
    last = BEFORE + len(part.pieces) + 1
    if not part.reason:
        state = "failed" if answer.record.state == "failed" else "incomplete"
        value = {"type": f"response.{state}", "response": response(answer, model)}
        yield event({**value, "sequence_number": last - 1})  # no number of a token that may still come
        return
    finished = item(answer, part, "completed")
    end = "incomplete" if part.reason == "length" else "completed"
    after_text = [
        {**delta, "delta": part.tail},
        {"type": "response.output_text.done", **place, "text": part.text, "logprobs": likely(part)},
        {"type": "response.content_part.done", **place, "part": output_text(part.text)},
        {"type": "response.output_item.done", "output_index": 0, "item": finished},
        {"type": f"response.{end}", "response": response(answer, model)},
    ]
    for line in numbered(last, after_text):
        yield line
