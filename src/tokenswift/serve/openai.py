"""Chats and completions in the forms of OpenAI's interface: whole objects, and streams of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tokenswift.chat.parser import Delta
from tokenswift.serve.answers import Answer, Part
from tokenswift.serve.errors import error_body
from tokenswift.types import Logprob

PING = b": ping\n\n"
LEAST = -9999.0  # in place of minus infinity, for which JSON has no number; vLLM's
encode = msgspec.json.encode
#: why a text ended → OpenAI's word for it
REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "stop"}


def data(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """An event that has a name."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


# ---- what all answers tell ----------------------------------------------------------------------


def usage(answer: Answer) -> dict[str, int]:
    """Tokens; a prompt counts once, however many texts follow it."""
    each = max(1, answer.body.choices)
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


def unfinished(answer: Answer) -> str:
    """Why an answer is not whole, in one line."""
    return answer.record.error or answer.stopped or "it was stopped"


# ---- log-probabilities --------------------------------------------------------------------------


def logprobs(answer: Answer, part: Part, start: int = 0, end: int | None = None) -> dict[str, Any] | None:
    """Of tokens from ``start`` to ``end``, of a completion with places behind an echo; None where nobody
    asked."""
    if answer.body.likely is None:
        return None
    if answer.record.kind == "completion":
        before = len(echoed(answer, part))
        return _listed(answer, [(token, before + at, each) for token, at, each in part.logprobs[start:end]])

    def one(token: int, value: float | None) -> dict[str, Any]:
        spelt = answer.spell(token)
        value = None if value is None else max(value, LEAST)
        return {"token": spelt.decode(errors="replace"), "logprob": value, "bytes": list(spelt)}

    content = [
        {
            **one(token, each and each.logprob),
            "top_logprobs": [one(*other) for other in (each.top if each else ())],
        }
        for token, _, each in part.logprobs[start:end]
    ]
    return {"content": content, "refusal": None}


def echoed(answer: Answer, part: Part) -> str:
    """The prompt, where the answer begins with it."""
    return part.echo.text if part.echo is not None and answer.body.echoes else ""


def echoed_logprobs(answer: Answer, part: Part) -> dict[str, Any] | None:
    """Log-probabilities of a prompt that an answer begins with; None where nobody asked."""
    if answer.body.likely is None or part.echo is None:
        return None
    tokens = zip(part.echo.tokens, part.echo.places, part.prompt_logprobs, strict=True)
    return _listed(answer, list(tokens), answer.body.likely)


def _listed(
    answer: Answer, found: Sequence[tuple[int, int, Logprob | None]], most: int | None = None
) -> dict[str, Any]:
    """Log-probabilities as completions have them: the token itself is always among the likeliest, of which
    there are up to ``most`` others."""
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, place, each in found:
        best: dict[str, float] = {}
        for other, value in () if each is None else (*each.top[:most], (token, each.logprob)):
            name = answer.spell(other).decode(errors="replace")
            best.setdefault(name, max(value, LEAST))  # of tokens that look alike the likeliest
        known = None if each is None else max(each.logprob, LEAST)
        spelt = answer.spell(token).decode(errors="replace")
        for values, value in zip(made.values(), (spelt, known, best or None, place), strict=True):
            values.append(value)
    return made


def of_prompt(answer: Answer, part: Part) -> dict[str, Any]:
    """vLLM's field ``prompt_logprobs``, where it was asked for: of each token by its id, and of the likeliest
    ones."""
    top = answer.body.given("prompt_logprobs")
    if top is None or part.echo is None:
        return {}

    def one(token: int, value: float, rank: int) -> dict[str, Any]:
        said = answer.spell(token).decode(errors="replace")
        return {"logprob": max(value, LEAST), "rank": rank, "decoded_token": said}

    made: list[dict[str, Any] | None] = []
    for token, each in zip(part.echo.tokens, part.prompt_logprobs, strict=True):
        if each is None:
            made.append(None)
            continue
        best = {str(t): one(t, value, i) for i, (t, value) in enumerate(each.top[:top], 1)}
        made.append({str(token): one(token, each.logprob, each.rank)} | best)
    return {"prompt_logprobs": made}


# ---- whole answers ------------------------------------------------------------------------------


def head(answer: Answer, model: str, chunk: bool = False) -> dict[str, Any]:
    """What all objects of an answer begin with."""
    kind = "text_completion" if answer.record.kind == "completion" else "chat.completion"
    kind += ".chunk" if chunk and kind != "text_completion" else ""
    return {"id": answer.id, "object": kind, "created": answer.record.created, "model": model}


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


# ---- streams ------------------------------------------------------------------------------------


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
            call |= {"id": answer.call_id(part, delta.index), "type": "function"}
            made.append({"tool_calls": [call]})
        elif delta.kind == "arguments":
            made.append({"tool_calls": [call]})
    return made


class Chunks:
    """The events of a stream of chat or completion, whose texts come in any order.

    Args:
        answer: the answer.
        model: its name.
    """

    def __init__(self, answer: Answer, model: str) -> None:
        self._answer, self._chat = answer, answer.record.kind == "chat"
        self.head = head(answer, model, chunk=True)
        options = answer.body.given("stream_options")
        self.with_usage = options is not None and bool(options.include_usage)
        self._so_far = options is not None and bool(options.continuous_usage_stats)
        self._parsers = [None if answer.calls is None else answer.calls.parser() for _ in answer.parts]
        self._called = [False for _ in answer.parts]
        self._likely_told = [0 for _ in answer.parts]
        self._waits = {part.index for part in answer.parts if answer.body.echoes}  # for their echo

    def chunk(self, part: Part, said: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        """An event."""
        choice = {"index": part.index, "finish_reason": reason, "logprobs": None, **said}
        used = {"usage": usage(self._answer) if self._so_far else None} if self.with_usage else {}
        return data({**self.head, "choices": [choice], **used, **more})

    def begin(self) -> Iterator[bytes]:
        """The events before any text."""
        for part in self._answer.parts if self._chat else ():
            yield self.chunk(part, {"delta": {"role": "assistant", "content": ""}})

    def new(
        self, part: Part, text: str, last: bool = False, more: dict[str, Any] | None = None
    ) -> Iterator[bytes]:
        """The events of more text, the first with what is told of its tokens; before them the prompt, where
        the text begins with it."""
        if part.index in self._waits:
            self._waits.remove(part.index)
            before = {"text": echoed(self._answer, part), "logprobs": echoed_logprobs(self._answer, part)}
            yield self.chunk(part, before)
        found, likely = self._pieces(part, text, last), self._newly_likely(part)
        if not found and (more or likely):
            found = [self._empty]
        for said in found:
            yield self.chunk(part, {**said, "logprobs": likely}, **(more or {}))
            likely = more = None

    def end(self, part: Part) -> bytes:
        """The event of a text's end."""
        return self.chunk(part, self._empty, ended(part, self._called[part.index]))

    @property
    def _empty(self) -> dict[str, Any]:
        return {"delta": {}} if self._chat else {"text": ""}

    def _pieces(self, part: Part, new: str, last: bool) -> list[dict[str, Any]]:
        """What a new text makes of choices."""
        parser = self._parsers[part.index]
        if parser is None:
            found = {"delta": {"content": new}} if self._chat else {"text": new}
            return [found] if new or not last else []
        deltas = [*parser.push(new), *(parser.finish() if last else ())]
        self._called[part.index] |= any(delta.kind == "call" for delta in deltas)
        return [{"delta": delta} for delta in told(self._answer, part, deltas)]

    def _newly_likely(self, part: Part) -> dict[str, Any] | None:
        """Log-probabilities of the tokens that the text has reached since the last time."""
        start = self._likely_told[part.index]
        end = self._likely_told[part.index] = part.told(start)
        return logprobs(self._answer, part, start, end) if end > start else None


async def chunks(answer: Answer, model: str, ping: float) -> AsyncIterator[bytes]:
    """A stream of chat or completion."""
    made = Chunks(answer, model)
    yield PING  # the headers are out before the prompt is read
    for value in made.begin():
        yield value
    async for found in answer.follow(0, ping):
        if found is None:
            yield PING
            continue
        part, start, end = found
        more = {"tokenswift": details(part, start, end)} if answer.body.own.details else None
        for value in made.new(part, "".join(part.pieces[start:end]), more=more):
            yield value
    if not all(part.reason for part in answer.parts):
        yield data(error_body(unfinished(answer), answer.status, code="stopped"))
        return
    for part in answer.parts:
        for value in made.new(part, part.tail, last=True):
            yield value
        yield made.end(part)
    if made.with_usage:
        yield data({**made.head, "choices": [], "usage": usage(answer), "tokenswift": own(answer)})
    yield b"data: [DONE]\n\n"
