"""Answers in the form of ``/v1/responses``: the whole object, and streams of events.

A stream numbers its events as if every token came alone: created 0, in progress 1, the item 2, its part 3,
text up to token t 3 + t, then what the end released, and the events of the end. So ``starting_after`` names a
place in the text, and means the same after a restart of the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from tokenswift.chat import CHOICES, Delta, call_id
from tokenswift.serve.answers import Answer
from tokenswift.serve.openai import PING, data, details, own, usage

#: kind of an item → the beginning of its id, its type, and how the events of its pieces are called
KINDS = {
    "text": ("msg", "message", "output_text"),
    "thought": ("rs", "reasoning", "reasoning_text"),
    "call": ("fc", "function_call", "function_call_arguments"),
}


def event(value: dict[str, Any]) -> bytes:
    """An event of a stream."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


def status(answer: Answer) -> str:
    """OpenAI's word for where an answer stands."""
    if answer.record.state == "done":
        return "incomplete" if answer.reason == "length" else "completed"
    if answer.done:
        return answer.record.state
    if not answer.running:  # the server ends, or an earlier one has
        return "queued" if answer.background and answer.kept else "incomplete"
    return "in_progress" if answer.pieces else "queued"


def items(answer: Answer) -> list[dict[str, Any]]:
    """What the text holds: a thought, messages and calls."""
    output, parser = Output(answer), answer.calls.parser()
    values = [*output.take([*parser.push(answer.text), *parser.finish()]), *output.finish()]
    return [value["item"] for value in values if value["type"] == "response.output_item.done"]


def asked(answer: Answer) -> dict[str, Any]:
    """The tools of a request, as its response has them."""
    tools = answer.calls.tools
    if tools is None:
        return {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
    known = [{"type": "function", "strict": True, **form["function"]} for form in tools.forms]
    choice = tools.choice if tools.choice in CHOICES else {"type": "function", "name": tools.choice}
    return {"parallel_tool_calls": tools.parallel, "tool_choice": choice, "tools": known}


def response(answer: Answer, model: str, state: str | None = None) -> dict[str, Any]:
    """The object of ``/v1/responses``; with ``state``, as it was then, before any text."""
    body: Any = answer.body
    names = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
    record, now, counts = answer.record, state or status(answer), usage(answer)
    over = answer.done and state is None
    code = "server_error" if answer.status >= 500 else "invalid_prompt"
    used = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
    cut = now == "incomplete" and over
    return {
        "id": answer.id,
        "object": "response",
        "created_at": record.created,
        "status": now,
        "background": answer.background,
        "error": {"code": code, "message": record.error} if now == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "metadata": body.metadata or {},
        "model": model,
        "output": items(answer) if state is None else [],
        **{name: getattr(body, name) for name in names},
        **asked(answer),
        "usage": used if over else None,
        "tokenswift": own(answer),
    }


class Output:
    """The events of a response's items, one after the other, as its text comes.

    Args:
        answer: the response.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._index, self._kind, self._text = -1, "", ""  # of the newest item; no kind: none is open
        self._item: dict[str, Any] = {}

    def take(self, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        """The events of pieces of the text."""
        for kind, text, index in deltas:
            if kind == "end":
                yield from self.close()
            elif kind == "call":
                call = {"call_id": call_id(self._answer.id, index), "name": text, "arguments": ""}
                yield from self.open("call", call)
            else:
                if kind not in ("arguments", self._kind):
                    yield from self.open(kind, {"content": []})
                self._text += text
                yield self._event("delta", delta=text, **({"logprobs": []} if kind == "text" else {}))

    def open(self, kind: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An item begins; the one that is open ends."""
        yield from self.close()
        self._kind, self._text, self._index = kind, "", self._index + 1
        (begin, named, _), name = KINDS[kind], self._answer.id.partition("_")[2]
        self._item = {"id": f"{begin}_{name}_{self._index}", "type": named, "status": "in_progress", **more}
        self._item |= {"text": {"role": "assistant"}, "thought": {"summary": []}}.get(kind, {})
        yield self._of_item("added")
        if kind == "text":
            yield {"type": "response.content_part.added", **self._place(), "part": output_text("")}

    def close(self, state: str = "completed") -> Iterator[dict[str, Any]]:
        """The item that is open, if any, has ended."""
        kind, text = self._kind, self._text
        if kind == "text":
            self._item["content"] = [output_text(text)]
            yield self._event("done", text=text, logprobs=[])
            yield {"type": "response.content_part.done", **self._place(), "part": output_text(text)}
        elif kind == "thought":
            self._item["content"] = [{"type": "reasoning_text", "text": text}]
            yield self._event("done", text=text)
        elif kind == "call":
            self._item["arguments"] = text
            yield self._event("done", name=self._item["name"], arguments=text)
        if kind:
            self._item["status"] = state
            yield self._of_item("done")
        self._kind = ""

    def finish(self) -> Iterator[dict[str, Any]]:
        """The end of the text, or as far as it is: a call that is open is cut."""
        if self._index < 0:
            yield from self.open("text", {"content": []})
        cut = self._kind == "call" or not self._answer.reason
        yield from self.close("incomplete" if cut else "completed")

    def _event(self, what: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{KINDS[self._kind][2]}.{what}", **self._place(), **more}

    def _place(self) -> dict[str, Any]:
        more = {} if self._kind == "call" else {"content_index": 0}
        return {"item_id": self._item["id"], "output_index": self._index, **more}

    def _of_item(self, what: str) -> dict[str, Any]:
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": {**self._item}}


def output_text(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Numbers:
    """Numbers events, and leaves out those that were seen.

    Args:
        after: number of the last one that was.
    """

    def __init__(self, after: int) -> None:
        self.newest, self._after = -1, after

    def of(self, values: Iterable[dict[str, Any]], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What is made already, and behind it the new ones among the next events; pieces of one thing in a
        row are one, numbered as the last."""
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
    numbers, output, parser = Numbers(after), Output(answer), answer.calls.parser()
    # where a token has no letters
    silent = [] if answer.calls.tools or answer.calls.thought else [Delta("text")]
    yield PING  # the headers are out before the prompt is read
    begun = [
        {"type": "response.created", "response": response(answer, model, "queued")},
        {"type": "response.in_progress", "response": response(answer, model, "in_progress")},
    ]
    for value in numbers.of(begun, []):
        yield event(value)
    async for found in answer.follow(ping):
        if found is None:
            yield PING
            continue
        start, end = found
        new: list[dict[str, Any]] = []
        for piece in answer.pieces[start:end]:
            numbers.of(output.take(parser.push(piece) or silent), new)
            start += numbers.newest <= after  # told of before
        if new and answer.body.own.get("details"):
            new[-1]["tokenswift"] = details(answer, start, end)
        for value in new:
            yield event(value)
    if not answer.reason:
        state = "failed" if answer.record.state == "failed" else "incomplete"
        value: dict[str, Any] = {"type": f"response.{state}", "response": response(answer, model)}
        yield event({**value, "sequence_number": numbers.newest})  # no number of a token that may still come
        return
    last = [*output.take([*parser.push(answer.tail), *parser.finish()]), *output.finish()]
    end = "incomplete" if answer.reason == "length" else "completed"
    last.append({"type": f"response.{end}", "response": response(answer, model)})
    for value in numbers.of(last, []):
        yield event(value)
