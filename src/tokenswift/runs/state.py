"""Where a run stands, from its journal: tokens and text so far, figures, and how it ended.

Kinds of records (key ``kind``; `runs.schema` has their fields): ``header``, the first; ``session``, each time
a process begins to write; ``tokens``; ``end``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from tokenswift.config import SamplingParams, shown
from tokenswift.runs.journal import Record
from tokenswift.runs.schema import End, Header, Session, Tokens, typed
from tokenswift.spec.drafters.registry import marks
from tokenswift.types import InputError, Loop, Step

#: parts of a run's identity of which both values are said, and the words for those that are only named
SAID = {
    "dtype": "dtype",
    "activations": "activations",
    "kv_cache_dtype": "kv_cache_dtype",
    "acceptance": "acceptance",
    "stop": "stop",
    "eos": "the end-of-text tokens (ignore_eos)",
    "rope": "rope_scaling",
}
NAMED = {
    "config": "the model's config",
    "weights": "the model's weights",
    "adapter": "the adapter",
    "tokenizer": "the tokenizer",
    "prompt": "the prompt",
}
#: what an identity leaves out
USUAL = {"activations": "float", "kv_cache_dtype": "auto"}


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
    def identity(self) -> dict[str, Any]:
        """What decides the tokens (see `loader.identity`), the prompt with it."""
        return {**msgspec.to_builtins(self.header.identity), "prompt": self.prompt}

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
        identity = self.header.identity
        if self.tokens and self.tokens[-1] in identity.eos:
            return "eos"
        stops = [ids for ids in identity.stop if isinstance(ids, list)]
        if any(self.tokens[-len(ids) :] == ids for ids in stops):
            if len(self.tokens) > identity.params.min_tokens:
                return "stop"
        if on_loop == "stop" and self._stopped_by_loop():
            return "loop"
        return "length" if len(self.tokens) >= most else None

    def take(self, record: Tokens, seconds: Mapping[str, float], passes: int) -> None:
        """Add the figures of a record of tokens, all but its text.

        Args:
            seconds, passes: of the sessions before this one.
        Raises:
            ValueError: what it says of the tokens so far cannot be.
        """
        self.tokens += record.ids
        self.sources += record.sources
        self.chars += record.chars
        self.steps[-1] += record.steps
        self.stream = msgspec.to_builtins(record.stream)
        window, loop = record.stream.window, record.loop
        newest = self.tokens[-len(window) - 1 :]
        if window and window not in (newest[-len(window) :], newest[:-1]):  # without an end-of-text token
            raise ValueError("stream.window: not the newest tokens")
        for phase, value in record.seconds.items():
            self.seconds[phase] = seconds.get(phase, 0.0) + value
        self.passes = passes + record.passes
        if loop is not None:
            if loop.start + loop.span > len(self.tokens):
                raise ValueError("loop: ends behind the newest token")
            self.loop = Loop(**msgspec.structs.asdict(loop))
        self.end = None

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
    number, length, texts = 1, 0, [""]
    earlier: tuple[dict[str, float], int] = {}, 0  # seconds and passes of the sessions before
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
                earlier = dict(state.seconds), state.passes
            elif isinstance(record, Tokens):
                state.before_last = length
                length += len(record.text)
                texts.append(record.text)
                state.take(record, *earlier)
            else:
                state.end = record
    except ValueError as error:
        raise InputError(
            f"{name} holds what no run writes (record {number}, {error}); valid: a run's journal"
        ) from None
    state.text = "".join(texts)
    return state


def _said(identity: Mapping[str, Any], key: str) -> Any:
    """A part of an identity, where it is not said what it was then."""
    value = identity.get(key)
    return USUAL.get(key) if value is None else value


def check_same(folder: str, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """See that what decides a run's tokens is what it was.

    Args:
        folder: the run's, for the message.
        kept, now: the identities that the journal names and that is at hand.
    Raises:
        InputError: naming everything that differs, with both values where they are short.
    """
    found = []
    for key in sorted((kept.keys() | now.keys()) - {"stored"}):  # of a file the weights' values decide
        was, given = (_said(each, key) for each in (kept, now))
        if was == given or (key == "weights" and kept["dtype"] != now["dtype"]):
            continue  # other values in another dtype: said once
        if key == "sampling":
            was, given = (asdict(SamplingParams(**each)) for each in (was, given))
            found += [f"{k} is {shown(given[k])}, was {shown(was[k])}" for k in was if given[k] != was[k]]
        elif key in SAID:
            found.append(f"{SAID[key]} is {shown(given)}, was {shown(was)}")
        else:
            found.append(f"{NAMED.get(key, key)} differs")
    if found:
        raise InputError(
            f"run_dir {folder} holds another run: {'; '.join(sorted(found))}; valid: what the run "
            f"began with, or another folder"
        )
