"""Answers in the forms of OpenAI's interface: whole objects, and streams of events.

A stream of ``/v1/responses`` numbers its events as if every token came alone: created 0, in
progress 1, the item 2, its part 3, text up to token t 3 + t, then what the end released, and the
events of the end. So ``starting_after`` names a place in the text, and means the same after a
restart of the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from tokenswift.chat import CHOICES, Delta, call_id
from tokenswift.serve.answer import Answer
from tokenswift.serve.refusals import Refused

PING = b": ping\n\n"  # a comment
QUIET = 15.0  # seconds without text after which a stream gets one, which keeps the connection open
#: why a text ended → OpenAI's word for it
REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "stop"}
#: kind of a piece → its name in the deltas of a chat's stream
SPOKEN = {"text": "content", "thought": "reasoning_content"}
#: kind of an item → the beginning of its id, its type, and how the events of its pieces are called
KINDS = {
    "text": ("msg", "message", "output_text"),
    "thought": ("rs", "reasoning", "reasoning_text"),
    "call": ("fc", "function_call", "function_call_arguments"),
}


def data(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# ---- what all answers tell -----------------------------------------------------------------------


def own(answer: Answer) -> dict[str, Any]:
    """What OpenAI's interface has no word for."""
    asked_seed = answer.body.sampler_seed
    seed = answer.record.seed if asked_seed is None else asked_seed
    return {"seed": seed, "ended_by": answer.reason, "steps": answer.steps}


def unfinished(answer: Answer) -> str:
    """Why an answer is not whole, in one line."""
    stopped = "it was stopped" if answer.done else "the server is shutting down"
    return answer.record.error or stopped


# ---- chats and completions -----------------------------------------------------------------------


def head(answer: Answer, model: str, chunk: str = "") -> dict[str, Any]:
    """What all objects of an answer begin with."""
    kind = "text_completion" if answer.body.kind == "completion" else f"chat.completion{chunk}"
    return {"id": answer.id, "object": kind, "created": int(answer.record.created), "model": model}


def usage(answer: Answer) -> dict[str, int]:
    """Tokens."""
    prompt, new = answer.record.prompt_tokens, len(answer.pieces)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def whole(answer: Answer, model: str) -> dict[str, Any]:
    """A finished answer."""
    said: dict[str, Any] = {"text": answer.text}
    message = answer.message
    if answer.body.kind == "chat":
        content = message["content"] or (None if "tool_calls" in message else "")
        said = {"message": {**message, "content": content, "refusal": None}}
    reason = ended(answer, "tool_calls" in message)
    choice = {"index": 0, **said, "finish_reason": reason, "logprobs": None}
    return {
        **head(answer, model),
        "choices": [choice],
        "usage": usage(answer),
        "tokenswift": own(answer),
    }


def ended(answer: Answer, calls: bool) -> str:
    """OpenAI's word for why a text ended, which may call tools."""
    return "tool_calls" if calls and answer.reason != "length" else REASONS[answer.reason]


def told(answer: Answer, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """Pieces of a text as deltas of a chat's stream."""
    made: list[dict[str, Any]] = []
    for kind, text, index in deltas:
        if kind in SPOKEN:
            made.append({SPOKEN[kind]: text})
        elif kind == "call":
            begun = {"index": index, "id": call_id(answer.id, index), "type": "function"}
            made.append({"tool_calls": [{**begun, "function": {"name": text, "arguments": ""}}]})
        elif kind == "arguments":
            made.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return made


async def chunks(answer: Answer, model: str) -> AsyncIterator[bytes]:
    """A stream of chat or completion."""
    with_usage = bool((answer.body.given("stream_options") or {}).get("include_usage"))
    begun, parser, calls = head(answer, model, ".chunk"), answer.calls.parser(), False

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        said = (
            {"delta": delta} if answer.body.kind == "chat" else {"text": delta.get("content", "")}
        )
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, **said}
        return data({**begun, "choices": [choice], **({"usage": None} if with_usage else {})})

    yield PING  # the headers are out before the prompt is read
    if answer.body.kind == "chat":
        yield chunk({"role": "assistant", "content": ""})
    async for found in answer.follow(QUIET):
        if found is None:
            yield PING
            continue
        deltas = told(answer, parser.push("".join(answer.pieces[slice(*found)])))
        calls |= any("tool_calls" in delta for delta in deltas)
        for delta in deltas:
            yield chunk(delta)
    if not answer.reason:
        yield data(Refused(answer.status, unfinished(answer), code="stopped").body)
        return
    deltas = told(answer, [*parser.push(answer.tail), *parser.finish()])
    for delta in deltas:
        yield chunk(delta)
    yield chunk({}, ended(answer, calls or any("tool_calls" in delta for delta in deltas)))
    if with_usage:
        yield data({**begun, "choices": [], "usage": usage(answer), "tokenswift": own(answer)})
    yield b"data: [DONE]\n\n"


# ---- responses -----------------------------------------------------------------------------------


def status(answer: Answer) -> str:
    """OpenAI's word for where an answer stands."""
    if answer.record.state == "done":
        return "incomplete" if answer.reason == "length" else "completed"
    if answer.done:
        return answer.record.state
    if not answer.running:  # the server ends, or an earlier one has
        return "queued" if answer.background and answer.folder else "incomplete"
    has_begun = answer.ticket is not None and bool(answer.pieces)  # here, not on an earlier server
    return "in_progress" if has_begun else "queued"


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
        "created_at": int(record.created),
        "status": now,
        "background": answer.background,
        "error": {"code": code, "message": record.error} if now == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "metadata": body.metadata or {},
        "model": model,
        "output": Events(answer).items() if state is None else [],
        **{name: getattr(body, name) for name in names},
        **asked(answer),
        "usage": used if over else None,
        "tokenswift": own(answer),
    }


class Events:
    """The events of a response, numbered, as its text comes.

    Args:
        answer: the response.
        after: number of the last event that is not told.

    Attributes:
        number: of the newest.
        made: events to be told, in which pieces of one thing in a row are one, numbered as the
            last.
    """

    def __init__(self, answer: Answer, after: int = -1) -> None:
        self._answer, self._after, self._parser = answer, after, answer.calls.parser()
        # where a token has no letters
        self._silent = [] if answer.calls.tools or answer.calls.thought else [Delta("text")]
        self.number, self.made = -1, list[dict[str, Any]]()
        self._index, self._kind, self._text = (
            -1,
            "",
            "",
        )  # of the newest item; no kind: none is open
        self._item: dict[str, Any] = {}

    def items(self) -> list[dict[str, Any]]:
        """What the text holds: a thought, messages and calls."""
        self.finish(self._answer.text)
        return [
            value["item"] for value in self.made if value["type"] == "response.output_item.done"
        ]

    def tell(self, kind: str, **more: Any) -> None:
        """One more event."""
        self.number += 1
        if self.number <= self._after:
            return
        value = {"type": f"response.{kind}", **more, "sequence_number": self.number}
        if self.made and "delta" in more and self.made[-1]["type"] == value["type"]:
            value["delta"] = self.made.pop()["delta"] + value["delta"]
        self.made.append(value)

    def taken(self) -> bytes:
        """What is to be told, which is forgotten."""
        made, self.made = self.made, []
        return b"".join(b"event: " + value["type"].encode() + b"\n" + data(value) for value in made)

    def push(self, piece: str) -> None:
        """The text of one more token."""
        self._take(self._parser.push(piece) or self._silent)

    def _take(self, deltas: Iterable[Delta]) -> None:
        for kind, text, index in deltas:
            if kind == "end":
                self._close()
            elif kind == "call":
                self._open("call", call_id=call_id(self._answer.id, index), name=text, arguments="")
            else:
                if kind not in ("arguments", self._kind):
                    self._open(kind, content=[])
                self._text += text
                more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
                self._of_text("delta", delta=text, **more)

    def finish(self, tail: str) -> None:
        """What stands behind the tokens, and the end, or as far as the text is: an open call is
        cut."""
        self._take([*self._parser.push(tail), *self._parser.finish()])
        if self._index < 0:
            self._open("text", content=[])
        cut = self._kind == "call" or not self._answer.reason
        self._close("incomplete" if cut else "completed")

    def _open(self, kind: str, **more: Any) -> None:
        """An item begins; the one that is open ends."""
        self._close()
        self._kind, self._text, self._index = kind, "", self._index + 1
        (begin, named, _), name = KINDS[kind], self._answer.id.partition("_")[2]
        self._item = {
            "id": f"{begin}_{name}_{self._index}",
            "type": named,
            "status": "in_progress",
            **more,
        }
        self._item |= {"text": {"role": "assistant"}, "thought": {"summary": []}}.get(kind, {})
        self._of_item("output_item.added")
        if kind == "text":
            self._of_text("added", "content_part", part=output_text(""))

    def _close(self, state: str = "completed") -> None:
        """The item that is open, if any, has ended."""
        kind, text = self._kind, self._text
        if kind == "text":
            self._item["content"] = [output_text(text)]
            self._of_text("done", text=text, logprobs=[])
            self._of_text("done", "content_part", part=output_text(text))
        elif kind == "thought":
            self._item["content"] = [{"type": "reasoning_text", "text": text}]
            self._of_text("done", text=text)
        elif kind == "call":
            self._item["arguments"] = text
            self._of_text("done", name=self._item["name"], arguments=text)
        if kind:
            self._item["status"] = state
            self._of_item("output_item.done")
        self._kind = ""

    def _of_text(self, what: str, part_of: str = "", **more: Any) -> None:
        place = {} if self._kind == "call" else {"content_index": 0}
        place |= {"item_id": self._item["id"], "output_index": self._index}
        self.tell(f"{part_of or KINDS[self._kind][2]}.{what}", **place, **more)

    def _of_item(self, kind: str) -> None:
        self.tell(kind, output_index=self._index, item={**self._item})


def output_text(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def events(answer: Answer, model: str, after: int) -> AsyncIterator[bytes]:
    """A stream of ``/v1/responses``: the events whose number is greater than ``after``."""
    events = Events(answer, after)
    yield PING  # the headers are out before the prompt is read
    events.tell("created", response=response(answer, model, "queued"))
    events.tell("in_progress", response=response(answer, model, "in_progress"))
    yield events.taken()
    async for found in answer.follow(QUIET):
        if found is None:
            yield PING
            continue
        for piece in answer.pieces[slice(*found)]:
            events.push(piece)
        yield events.taken()
    state = "incomplete" if answer.reason in ("", "length") else "completed"
    if answer.reason:
        events.finish(answer.tail)
        events.tell(state, response=response(answer, model))
    else:  # no number of a token that may still come
        state = "failed" if answer.record.state == "failed" else state
        value = {"type": f"response.{state}", "response": response(answer, model)}
        events.made.append({**value, "sequence_number": events.number})
    yield events.taken()
