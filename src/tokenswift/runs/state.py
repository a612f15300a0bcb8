"""Where a run stands, from its journal: tokens and text so far, figures, and how it ended.

Kinds of records (key ``kind``; `runs.schema` has their fields): ``header``, the first; ``session``, each time
a process begins to write; ``tokens``; ``end``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenswift.runs.journal import Record
from tokenswift.runs.schema import End, Header, Session, Stream, Tokens, typed
from tokenswift.spec.drafters.registry import marks
from tokenswift.types import InputError, Loop, Step


def sources_of(step: Step) -> str:
    """A letter for each token of a step; "t" for all where nobody says."""
    named = step.sources or ("target",) * len(step.token_ids)
    known = marks()
    return "".join(known[name].letter for name in named)


@dataclass(slots=True)
class RunState:
    """A run so far.

    Attributes:
        header: the journal's first record.
        sessions: records of the processes that wrote it.
        tokens, sources, chars: new tokens, a letter and a number of characters for each.
        text: their text, without ``tail``.
        before_last: characters of ``text`` before the last record of tokens.
        steps: the figures of each step, by session.
        seconds: by phase, of all sessions.
        passes: draft passes.
        stream: state of the detokeniser, None before the first token.
        loop: the first loop that was seen.
        end: the record that ended it, None while it goes on; forgotten when more tokens follow.
    """

    header: Header
    sessions: list[Session] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sources: str = ""
    chars: list[int] = field(default_factory=list)
    text: str = ""
    before_last: int = 0
    steps: list[list[tuple[int, ...]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    stream: dict[str, Any] | None = None
    loop: Loop | None = None
    end: End | None = None

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self.header.prompt

    @property
    def session(self) -> Session:
        """The newest session."""
        return self.sessions[-1]

    @property
    def tail(self) -> str:
        """Text that the end released."""
        return self.end.tail if self.end else ""

    @property
    def all_steps(self) -> list[tuple[int, ...]]:
        """The steps of all sessions."""
        return [step for session in self.steps for step in session]

    def finished(self, most: int, on_loop: str) -> str | None:
        """Why there is nothing to add, None when there is.

        Args:
            most: new tokens at most, now.
            on_loop: what a loop does, now.
        """
        if self.stream is not None and self.stream["stopped"]:
            return "stop"
        if self.tokens and self.tokens[-1] in self.header.identity.eos:
            return "eos"
        if on_loop == "stop" and self._stopped_by_loop():
            return "loop"
        return "length" if len(self.tokens) >= most else None

    def _stopped_by_loop(self) -> bool:
        if self.end is not None and self.end.reason == "loop":
            return True
        loop = self.loop  # the end may not have been written
        return loop is not None and loop.sign == "pattern" and loop.start + loop.span == len(self.tokens)


def replay(records: list[Record], name: str = "the journal") -> RunState:
    """The state that a journal's records lead to.

    Raises:
        InputError: records that are whole but make no run.
    """
    if len(records) < 2 or records[0].get("kind") != "header" or records[1].get("kind") != "session":
        raise InputError(f"{name} does not begin with a run's header; valid: a run's journal")
    number, texts = 1, [""]
    stream: Stream | None = None
    length = 0
    base: dict[str, float] = {}
    base_passes = 0
    try:
        state = RunState(typed(records[0], Header))
        for raw in records[1:]:
            number += 1
            record = typed(raw, Session | Tokens | End)
            if isinstance(record, Session):
                if record.start > length:
                    raise ValueError(f"start: {record.start} of {length} characters")
                state.sessions.append(record)
                state.steps.append([])
                base, base_passes = dict(state.seconds), state.passes
            elif isinstance(record, Tokens):
                state.tokens += record.ids
                state.sources += record.sources
                state.chars += record.chars
                state.before_last = length
                length += len(record.text)
                texts.append(record.text)
                state.steps[-1] += record.steps
                stream = record.stream
                _check_newest(state.tokens, record)
                for phase, value in record.seconds.items():
                    state.seconds[phase] = base.get(phase, 0.0) + value
                state.passes = base_passes + record.passes
                if record.loop is not None:
                    state.loop = Loop(**msgspec.structs.asdict(record.loop))
                state.end = None
            else:
                state.end = record
    except ValueError as error:
        raise InputError(
            f"{name} holds what no run writes (record {number}, {error}); valid: a run's journal"
        ) from None
    state.text = "".join(texts)
    state.stream = None if stream is None else msgspec.to_builtins(stream)
    return state


def _check_newest(tokens: list[int], record: Tokens) -> None:
    """See that what a record says of the tokens so far can be."""
    window, loop = record.stream.window, record.loop
    newest = tokens[-len(window) - 1 :]
    if window and window not in (newest[-len(window) :], newest[:-1]):  # without an end-of-text token
        raise ValueError("stream.window: not the newest tokens")
    if loop is not None and loop.start + loop.span > len(tokens):
        raise ValueError("loop: ends behind the newest token")
