"""Answers in the form of ``/v1/responses``: the whole object, and streams of events.

A stream numbers its events by tokens: created 0, in progress 1, the item 2, its part 3, text up to token t
3 + t, then what the end released, and the events of the end. So ``starting_after`` names a place in the text,
and means the same after a restart of the server. Where tools may be called, events follow from the tokens,
and are numbered as if every token came alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from tokenswift.chat.parser import Delta
from tokenswift.serve.answers import CANCELLED, ENDS, Answer, Part
from tokenswift.serve.openai import PING, details, event, own, usage

#: kind of an item → how the events of its pieces are called
PIECES = {"text": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}
BEFORE = 3  # number of the last event before the first token


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


def item(
    answer: Answer, part: Part, kind: str, state: str, text: str = "", call: tuple[int, str] = (0, "")
) -> dict[str, Any]:
    """A part of what one text holds.

    Args:
        kind: "text", "thought" or "call", as `chat.parser.Delta` has them.
        text: of a call its arguments.
        call: its index and name.
    """
    stem, begun = f"{answer.id.partition('_')[2]}_{part.index}", state == "in_progress"
    if kind == "call":
        called = {"call_id": answer.call_id(part, call[0]), "name": call[1], "arguments": text}
        return {"id": f"fc_{stem}_{call[0]}", "type": "function_call", "status": state, **called}
    if kind == "thought":
        content = [] if begun else [{"type": "reasoning_text", "text": text}]
        made = {"id": f"rs_{stem}", "type": "reasoning", "status": state, "summary": []}
    else:
        content = [] if begun else [output_text(text)]
        made = {"id": f"msg_{stem}", "type": "message", "role": "assistant", "status": state}
    return {**made, "content": content}


def output_text(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def items(answer: Answer, part: Part) -> Iterator[dict[str, Any]]:
    """What one text holds: a message, and calls."""
    said, state = answer.said(part), "completed" if part.reason else "incomplete"
    if said.thought:
        yield item(answer, part, "thought", state, said.thought)
    if said.text or not said.calls:
        yield item(answer, part, "text", state, said.text)
    for i, (name, arguments) in enumerate(said.calls):
        cut = i == len(said.calls) - 1 and not said.whole
        yield item(answer, part, "call", "incomplete" if cut else "completed", arguments, (i, name))


def asked(answer: Answer) -> dict[str, Any]:
    """The tools of a request, as its response has them."""
    if answer.calls is None or answer.calls.tools is None:
        return {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
    tools = answer.calls.tools
    known = [{"type": "function", "strict": True, **tool.form["function"]} for tool in tools.known]
    choice = {"type": "function", "name": tools.choice} if tools.is_named else tools.choice
    return {"parallel_tool_calls": tools.parallel, "tool_choice": choice, "tools": known}


def response(answer: Answer, model: str, state: str | None = None) -> dict[str, Any]:
    """The object of ``/v1/responses``; with ``state``, as it was then, before any text."""
    body: Any = answer.body
    now = status(answer) if state is None else state
    outputs = answer.parts if state is None else ()
    counts = usage(answer)
    cut = now == "incomplete" and answer.record.state == "done"
    failed = answer.record.state == "failed" and state is None
    code = "server_error" if answer.status >= 500 else "invalid_prompt"
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.record.created,
        "completed_at": answer.over_at if now == "completed" else None,
        "status": now,
        "background": answer.background,
        "error": {"code": code, "message": answer.record.error} if failed else None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [item for part in outputs for item in items(answer, part)],
        "previous_response_id": body.previous_response_id,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        **asked(answer),
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


class Output:
    """The events of a response's items, one after the other, as its text comes.

    Args:
        answer: the response.
        part: its text.
    """

    def __init__(self, answer: Answer, part: Part) -> None:
        self._answer, self._part = answer, part
        self._index = -1  # of the newest item
        self._kind = ""  # of the item that is open; "": none is
        self._text: list[str] = []
        self._call = (0, "")  # index and name, where it is a call

    def take(self, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        """The events of pieces of the text."""
        for kind, text, index in deltas:
            if kind == "end":
                yield from self.close()
            elif kind == "call":
                yield from self.open("call", (index, text))
            else:
                if kind != "arguments" and kind != self._kind:
                    yield from self.open(kind)
                self._text.append(text)
                yield self._event("delta", delta=text, **({"logprobs": []} if kind == "text" else {}))

    def open(self, kind: str, call: tuple[int, str] = (0, "")) -> Iterator[dict[str, Any]]:
        """An item begins; the one that is open ends."""
        yield from self.close()
        self._kind, self._call, self._text = kind, call, []
        self._index += 1
        yield self._item("added", "in_progress")
        if kind == "text":
            yield {"type": "response.content_part.added", **self._place(), "part": output_text("")}

    def close(self, whole: bool = True) -> Iterator[dict[str, Any]]:
        """The item that is open, if any, has ended; ``whole``: it is no call that was cut."""
        kind, text = self._kind, "".join(self._text)
        if kind == "text":
            text = self._part.text if self._answer.calls is None else text
            yield self._event("done", text=text, logprobs=[])
            yield {"type": "response.content_part.done", **self._place(), "part": output_text(text)}
        elif kind == "thought":
            yield self._event("done", text=text)
        elif kind == "call":
            yield self._event("done", name=self._call[1], arguments=text)
        if kind:
            yield self._item("done", "completed" if whole or kind != "call" else "incomplete", text)
        self._kind = ""

    @property
    def is_empty(self) -> bool:
        """Whether no item has begun."""
        return self._index < 0

    def _event(self, what: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{PIECES[self._kind]}.{what}", **self._place(), **more}

    def _place(self) -> dict[str, Any]:
        name = item(self._answer, self._part, self._kind, "in_progress", "", self._call)["id"]
        more = {} if self._kind == "call" else {"content_index": 0}
        return {"item_id": name, "output_index": self._index, **more}

    def _item(self, what: str, state: str, text: str = "") -> dict[str, Any]:
        made = item(self._answer, self._part, self._kind, state, text, self._call)
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": made}


class Numbers:
    """Numbers events, and leaves out those that were seen.

    Args:
        after: number of the last one that was.
    """

    def __init__(self, after: int) -> None:
        self.newest, self._after = -1, after

    def of(self, values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The new ones among the next events; pieces of one thing in a row are one, numbered as the last."""
        made: list[dict[str, Any]] = []
        for value in values:
            self.newest += 1
            if self.newest <= self._after:
                continue
            value = {**value, "sequence_number": self.newest}
            if made and "delta" in value and made[-1]["type"] == value["type"]:
                before = made.pop()
                value["delta"] = before["delta"] + value["delta"]
            made.append(value)
        return made


async def events(answer: Answer, model: str, after: int, ping: float) -> AsyncIterator[bytes]:
    """A stream of ``/v1/responses``: the events whose number is greater than ``after``."""
    part, numbers = answer.parts[0], Numbers(after)
    output = Output(answer, part)
    parser = None if answer.calls is None else answer.calls.parser()

    def of_token(at: int) -> Iterator[dict[str, Any]]:
        """The events of a token; where nothing is called that is one."""
        piece = part.pieces[at]
        return output.take([Delta("text", piece)] if parser is None else parser.push(piece))

    yield PING  # the headers are out before the prompt is read
    begun = [
        {"type": "response.created", "response": response(answer, model, "queued")},
        {"type": "response.in_progress", "response": response(answer, model, "in_progress")},
    ]
    first = 0
    if parser is None:
        begun += output.open("text")
        first = max(0, after - BEFORE)
    for value in numbers.of(begun):
        yield event(value)
    numbers.newest += first
    async for found in answer.follow(first, ping):
        if found is None:
            yield PING
            continue
        _, start, end = found
        new = numbers.of(value for at in range(start, end) for value in of_token(at))
        if new and answer.body.own.details:
            new[-1]["tokenswift"] = details(part, start, end)
        for value in new:
            yield event(value)
    if parser is None:
        numbers.newest = BEFORE + len(part.pieces)
    if not part.reason:
        state = "failed" if answer.record.state == "failed" else "incomplete"
        value = {"type": f"response.{state}", "response": response(answer, model)}
        yield event({**value, "sequence_number": numbers.newest})  # no number of a token that may still come
        return
    rest = [Delta("text", part.tail)] if parser is None else [*parser.push(part.tail), *parser.finish()]
    last = [*output.take(rest)]
    if output.is_empty:
        last += output.open("text")
    last += output.close(answer.said(part).whole)
    end = "incomplete" if part.reason == "length" else "completed"
    last.append({"type": f"response.{end}", "response": response(answer, model)})
    for value in numbers.of(last):
        yield event(value)
