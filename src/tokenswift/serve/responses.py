"""Responses in the form of OpenAI's interface: the object, and its stream of events.

A stream numbers its events as if every token came alone: created 0, in progress 1, the item 2, its
part 3, text up to token t 3 + t, then what the end released, and the events of the end. So
``starting_after`` names a place in the text, and means the same after a restart of the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tokenswift.chat import CHOICES, Delta, call_id
from tokenswift.serve.answer import Answer
from tokenswift.serve.objects import (
    PING,
    QUIET,
    ShownTools,
    data,
    output_text,
    own_fields,
    usage,
)

#: fields of a request that its response shows
SHOWN_FIELDS = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "temperature",
    "top_p",
)


class ItemKind(NamedTuple):
    """What items of a kind are called.

    Attributes:
        prefix: what an id begins with.
        type: of the item.
        events: what the events of its pieces begin with.
    """

    prefix: str
    type: str
    events: str


#: kind of a piece → the item that it belongs to
ITEM_KINDS = {
    "text": ItemKind("msg", "message", "output_text"),
    "thought": ItemKind("rs", "reasoning", "reasoning_text"),
    "call": ItemKind("fc", "function_call", "function_call_arguments"),
}
#: kind of an item → fields that no other one has
ITEM_FIELDS: dict[str, dict[str, object]] = {
    "text": {"role": "assistant"},
    "thought": {"summary": []},
}


# ---- the object ----------------------------------------------------------------------------------


def status(answer: Answer) -> str:
    """OpenAI's word for where an answer stands."""
    if answer.record.state == "done":
        return "incomplete" if answer.reason == "length" else "completed"
    if answer.done:
        return answer.record.state
    if not answer.running:  # the server ends, or an earlier one has
        return "queued" if answer.background and answer.folder else "incomplete"
    has_begun = answer.ticket is not None and bool(answer.pieces)  # on this server
    return "in_progress" if has_begun else "queued"


def shown_tools(answer: Answer) -> ShownTools:
    """The tools of a request, as its response has them."""
    tools = answer.calls.tools
    if tools is None:
        return ShownTools(parallel_tool_calls=False, tool_choice="none", tools=[])
    choice: str | dict[str, str] = tools.choice
    if tools.choice not in CHOICES:
        choice = {"type": "function", "name": tools.choice}
    flat = [{"type": "function", "strict": True, **form["function"]} for form in tools.forms]
    return ShownTools(parallel_tool_calls=tools.parallel, tool_choice=choice, tools=flat)


def response_object(
    answer: Answer, model: str, early_status: str | None = None
) -> dict[str, object]:
    """The object of ``/v1/responses``.

    Args:
        early_status: its status before any text, of which it is the object then; None: it is as
            the answer stands.
    """
    body = answer.body
    record = answer.record
    is_over = answer.done and early_status is None
    now = early_status or status(answer)
    code = "server_error" if answer.status >= 500 else "invalid_prompt"
    was_cut = now == "incomplete" and is_over
    return {
        "id": answer.id,
        "object": "response",
        "created_at": int(record.created),
        "status": now,
        "background": answer.background,
        "error": {"code": code, "message": record.error} if now == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
        "metadata": body.settings_of("metadata"),
        "model": model,
        "output": ResponseEvents(answer).items() if early_status is None else [],
        **{name: body.value_of(name) for name in SHOWN_FIELDS},
        **shown_tools(answer),
        "usage": response_usage(answer) if is_over else None,
        "tokenswift": own_fields(answer),
    }


def response_usage(answer: Answer) -> dict[str, object]:
    """The tokens of an answer, in the words of responses."""
    counts = usage(answer)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


# ---- events --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Event:
    """An event of a stream.

    Attributes:
        type: such as ``response.output_text.delta``.
        fields: what it tells besides.
        number: its place in the stream.
        delta: the piece of text that it tells; None: it tells none.
    """

    type: str
    fields: dict[str, object]
    number: int
    delta: str | None = None

    def encoded(self) -> bytes:
        """The bytes that a client gets."""
        value = {"type": self.type, **self.fields, "sequence_number": self.number}
        if self.delta is not None:
            value["delta"] = self.delta
        return b"event: " + self.type.encode() + b"\n" + data(value)


class ResponseEvents:
    """The events of a response, numbered, as its text comes.

    Args:
        answer: the response.
        after: number of the last event that is not told.

    Attributes:
        number: of the newest.
        waiting: events to be told, in which pieces of one thing in a row are one, numbered as the
            last.
    """

    def __init__(self, answer: Answer, after: int = -1) -> None:
        self._answer = answer
        self._after = after
        self._parser = answer.calls.parser()
        has_text_alone = not (answer.calls.tools or answer.calls.thought)
        #: what a token without letters is told as
        self._silent = [Delta("text")] if has_text_alone else []
        self.number = -1
        self.waiting: list[Event] = []
        self._index = -1  # of the newest item
        self._kind = ""  # of the item that is open; "": none is
        self._text = ""  # of that item
        self._item: dict[str, object] = {}

    def items(self) -> list[object]:
        """What the text holds: a thought, messages and calls."""
        self.finish(self._answer.text)
        return [
            event.fields["item"]
            for event in self.waiting
            if event.type == "response.output_item.done"
        ]

    def tell(self, kind: str, fields: dict[str, object], delta: str | None = None) -> None:
        """One more event."""
        self.number += 1
        if self.number <= self._after:
            return
        event = Event(f"response.{kind}", fields, self.number, delta)
        newest = self.waiting[-1] if self.waiting else None
        if delta is None or newest is None or newest.type != event.type:
            self.waiting.append(event)
        else:
            newest.delta = (newest.delta or "") + delta
            newest.fields = fields
            newest.number = self.number

    def tell_response(self, state: str, response: dict[str, object]) -> None:
        """An event of the response itself."""
        self.tell(state, {"response": response})

    def taken(self) -> bytes:
        """What is to be told, which is forgotten."""
        encoded = b"".join(event.encoded() for event in self.waiting)
        self.waiting = []
        return encoded

    def push(self, piece: str) -> None:
        """The text of one more token."""
        self._take(self._parser.push(piece) or self._silent)

    def _take(self, deltas: Iterable[Delta]) -> None:
        for kind, text, index in deltas:
            if kind == "end":
                self._close()
            elif kind == "call":
                key = call_id(self._answer.id, index)
                self._open("call", {"call_id": key, "name": text, "arguments": ""})
            else:
                if kind not in ("arguments", self._kind):
                    self._open(kind, {"content": []})
                self._text += text
                fields: dict[str, object] = {"logprobs": []} if kind == "text" else {}
                self._of_text("delta", fields, delta=text)

    def finish(self, tail: str) -> None:
        """What stands behind the tokens, and the end, or as far as the text is: an open call is
        cut."""
        self._take([*self._parser.push(tail), *self._parser.finish()])
        if self._index < 0:
            self._open("text", {"content": []})
        is_cut = self._kind == "call" or not self._answer.reason
        self._close("incomplete" if is_cut else "completed")

    def _open(self, kind: str, fields: dict[str, object]) -> None:
        """An item begins; the one that is open ends."""
        self._close()
        self._kind = kind
        self._text = ""
        self._index += 1
        names = ITEM_KINDS[kind]
        answer_name = self._answer.id.partition("_")[2]
        self._item = {
            "id": f"{names.prefix}_{answer_name}_{self._index}",
            "type": names.type,
            "status": "in_progress",
            **fields,
            **ITEM_FIELDS.get(kind, {}),
        }
        self._of_item("output_item.added")
        if kind == "text":
            self._of_part("added", "")

    def _close(self, state: str = "completed") -> None:
        """The item that is open, if any, has ended."""
        kind = self._kind
        text = self._text
        if kind == "text":
            self._item["content"] = [output_text(text)]
            self._of_text("done", {"text": text, "logprobs": []})
            self._of_part("done", text)
        elif kind == "thought":
            self._item["content"] = [{"type": "reasoning_text", "text": text}]
            self._of_text("done", {"text": text})
        elif kind == "call":
            self._item["arguments"] = text
            self._of_text("done", {"name": self._item["name"], "arguments": text})
        if kind:
            self._item["status"] = state
            self._of_item("output_item.done")
        self._kind = ""

    def _of_text(self, change: str, fields: dict[str, object], delta: str | None = None) -> None:
        """An event of the open item's text."""
        self.tell(f"{ITEM_KINDS[self._kind].events}.{change}", self._placed(fields), delta)

    def _of_part(self, change: str, text: str) -> None:
        """An event of the open message's one part."""
        self.tell(f"content_part.{change}", self._placed({"part": output_text(text)}))

    def _placed(self, fields: dict[str, object]) -> dict[str, object]:
        """The fields of an event within the open item."""
        place = {"item_id": self._item["id"], "output_index": self._index}
        if self._kind != "call":
            place["content_index"] = 0
        return {**place, **fields}

    def _of_item(self, kind: str) -> None:
        self.tell(kind, {"output_index": self._index, "item": {**self._item}})


async def stream_events(answer: Answer, model: str, after: int) -> AsyncIterator[bytes]:
    """A stream of ``/v1/responses``: the events whose number is greater than ``after``."""
    events = ResponseEvents(answer, after)
    yield PING  # the headers are out before the prompt is read
    events.tell_response("created", response_object(answer, model, "queued"))
    events.tell_response("in_progress", response_object(answer, model, "in_progress"))
    yield events.taken()
    async for stretch in answer.follow(QUIET):
        if stretch is None:
            yield PING
            continue
        start, end = stretch
        for piece in answer.pieces[start:end]:
            events.push(piece)
        yield events.taken()
    state = "incomplete" if answer.reason in ("", "length") else "completed"
    if answer.reason:
        events.finish(answer.tail)
        events.tell_response(state, response_object(answer, model))
    else:  # no number of a token that may still come
        state = "failed" if answer.record.state == "failed" else state
        fields: dict[str, object] = {"response": response_object(answer, model)}
        events.waiting.append(Event(f"response.{state}", fields, events.number))
    yield events.taken()
