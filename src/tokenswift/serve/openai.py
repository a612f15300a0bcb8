"""Chats and completions in the forms of OpenAI's interface: whole objects, and streams of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec

from tokenswift.chat.parser import Delta
from tokenswift.serve.answers import Answer, Part, Told, ranked, token_told
from tokenswift.serve.errors import error_body

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

    def one(token: bytes, value: float | None) -> dict[str, Any]:
        return {"token": token.decode(errors="replace"), "logprob": value, "bytes": list(token)}

    return [
        {**one(token, value), "top_logprobs": [one(*other) for other in top]}
        for token, _, value, top in part.logprobs[start:end]
    ]


def logprobs(answer: Answer, part: Part, start: int = 0, end: int | None = None) -> dict[str, Any] | None:
    """The same of a chat or completion, places being those behind an echo; None where nobody asked."""
    if answer.body.likely is None:
        return None
    if answer.record.kind == "chat":
        return {"content": likely(part, start, end), "refusal": None}
    before = len(echoed(answer, part))
    return _listed([(token, before + at, value, top) for token, at, value, top in part.logprobs[start:end]])


def echoed(answer: Answer, part: Part) -> str:
    """The prompt, where the answer begins with it."""
    return part.echo.text if part.echo is not None and answer.body.echoes else ""


def echoed_logprobs(answer: Answer, part: Part) -> dict[str, Any] | None:
    """Log-probabilities of a prompt that an answer begins with; None where nobody asked."""
    top = answer.body.likely
    if top is None or part.echo is None:
        return None
    tokens = zip(part.echo.tokens, part.echo.places, part.prompt_logprobs, strict=True)
    return _listed([token_told(token, at, found, answer.spell, top) for token, at, found in tokens])


def _listed(found: Sequence[Told]) -> dict[str, Any]:
    """Log-probabilities as completions have them: the token itself is always among the likeliest."""
    tops: list[dict[str, float] | None] = []
    for token, _, value, top in found:
        best: dict[str, float] = {}
        for other, its in [] if value is None else [*top, (token, value)]:
            best.setdefault(other.decode(errors="replace"), its)  # of tokens that look alike the likeliest
        tops.append(None if value is None else best)
    return {
        "tokens": [token.decode(errors="replace") for token, _, _, _ in found],
        "token_logprobs": [value for _, _, value, _ in found],
        "top_logprobs": tops,
        "text_offset": [place for _, place, _, _ in found],
    }


def whole(answer: Answer, model: str) -> dict[str, Any]:
    """A finished answer."""
    chat = answer.record.kind == "chat"
    choices: list[dict[str, Any]] = []
    for part in answer.parts:
        said, reason = {"text": echoed(answer, part) + part.text}, REASONS[part.reason]
        if chat:
            said, reason = message(answer, part)
        found = logprobs(answer, part, 0, part.told())
        if found is not None and answer.body.echoes and (before := echoed_logprobs(answer, part)):
            found = {name: before[name] + found[name] for name in found}
        more = {"finish_reason": reason, "logprobs": found, **({} if chat else of_prompt(answer, part))}
        choices.append({"index": part.index, **said, **more})
    made = {**head(answer, model), "choices": choices, "usage": usage(answer)}
    made |= of_prompt(answer, answer.parts[0]) if chat else {}
    return {**made, "tokenswift": own(answer)}


def of_prompt(answer: Answer, part: Part) -> dict[str, Any]:
    """vLLM's field ``prompt_logprobs``, where it was asked for."""
    top = getattr(answer.body, "prompt_logprobs", None)
    if top is None or part.echo is None:
        return {}
    return {"prompt_logprobs": ranked(part.echo.tokens, part.prompt_logprobs, answer.spell, top)}


def message(answer: Answer, part: Part) -> tuple[dict[str, Any], str]:
    """The message of a chat's text, and why it ended."""
    said = answer.said(part)
    made: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.calls:
        made |= {"content": said.text or None, "tool_calls": answer.tool_calls(part, said)}
    if said.thought:
        made["reasoning_content"] = said.thought
    return {"message": made}, ended(part, bool(said.calls))


def ended(part: Part, calls: bool) -> str:
    """OpenAI's word for why a text ended, which may call tools."""
    return "tool_calls" if calls and part.reason != "length" else REASONS[part.reason]


def told(answer: Answer, part: Part, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """Pieces of a chat's text as deltas of its stream; text that stands in a row is one."""
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
            made.append(
                {"tool_calls": [call | {"id": answer.call_id(part, delta.index), "type": "function"}]}
            )
        elif delta.kind == "arguments":
            made.append({"tool_calls": [call]})
    return made


async def chunks(answer: Answer, model: str, ping: float) -> AsyncIterator[bytes]:
    """A stream of chat or completion."""
    chat, first = answer.record.kind == "chat", head(answer, model, chunk=True)
    options = getattr(answer.body, "stream_options", None)
    with_usage = options is not None and bool(options.include_usage)
    so_far = options is not None and bool(options.continuous_usage_stats)
    detailed = answer.body.own.details

    def chunk(part: Part, said: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": part.index, "finish_reason": reason, "logprobs": None, **said}
        used = {"usage": usage(answer) if so_far else None} if with_usage else {}
        return data({**first, "choices": [choice], **used, **more})

    parsers = [None if answer.calls is None else answer.calls.parser() for _ in answer.parts]
    called = [False for _ in answer.parts]

    def pieces(part: Part, new: str, last: bool = False) -> list[dict[str, Any]]:
        """What a new text makes of choices."""
        parser = parsers[part.index]
        if parser is None:
            return [{"delta": {"content": new}} if chat else {"text": new}]
        deltas = [*parser.push(new), *(parser.finish() if last else ())]
        called[part.index] |= any(delta.kind == "call" for delta in deltas)
        return [{"delta": delta} for delta in told(answer, part, deltas)]

    likely_told = [0 for _ in answer.parts]

    def newly_likely(part: Part) -> dict[str, Any] | None:
        """Log-probabilities of the tokens that the text has reached since the last time."""
        if answer.body.likely is None:
            return None
        start = likely_told[part.index]
        end = likely_told[part.index] = part.told(start)
        return logprobs(answer, part, start, end) if end > start else None

    waits = {part.index for part in answer.parts if answer.body.echoes}  # for their echo

    def echo(part: Part) -> list[bytes]:
        """The event of a prompt that a text begins with, once."""
        if part.index not in waits:
            return []
        waits.remove(part.index)
        return [chunk(part, {"text": echoed(answer, part), "logprobs": echoed_logprobs(answer, part)})]

    yield PING  # the headers are out before the prompt is read
    for part in answer.parts if chat else ():
        yield chunk(part, {"delta": {"role": "assistant", "content": ""}})
    for part in answer.parts if answer.body.likely is None else ():
        for value in echo(part):
            yield value
    async for found in answer.follow(0, ping):
        if found is None:
            yield PING
            continue
        part, start, end = found
        for value in echo(part):
            yield value
        more = {"tokenswift": details(part, start, end)} if detailed else {}
        found = pieces(part, "".join(part.pieces[start:end]))
        likely_ones = newly_likely(part)
        if not found and (more or likely_ones):
            found = [{"delta": {}}]
        for i, said in enumerate(found):  # what is told of the tokens stands with the first
            yield chunk(part, said if i else {**said, "logprobs": likely_ones}, None, **({} if i else more))
    if not all(part.reason for part in answer.parts):
        yield data(error_body(unfinished(answer), answer.status, code="stopped"))
        return
    for part in answer.parts:
        for value in echo(part):
            yield value
        found = pieces(part, part.tail, True) if part.tail or answer.calls is not None else []
        likely_ones = newly_likely(part)
        if not found and likely_ones:
            found = [{"delta": {}}] if chat else [{"text": ""}]
        for i, said in enumerate(found):
            yield chunk(part, said if i else {**said, "logprobs": likely_ones})
        yield chunk(part, {"delta": {}} if chat else {"text": ""}, ended(part, called[part.index]))
    if with_usage:
        yield data({**first, "choices": [], "usage": usage(answer), "tokenswift": own(answer)})
    yield b"data: [DONE]\n\n"


def unfinished(answer: Answer) -> str:
    """Why an answer is not whole, in one line."""
    return answer.record.error or answer.stopped or "it was stopped"
