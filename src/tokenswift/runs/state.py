"""Where a run stands, from its journal: tokens and text so far, figures, and how it ended.

Kinds of records (key ``kind``):

- ``header``, the first: ``identity`` (see `runs.identity`), ``prompt`` (token ids), ``model`` (how it was
  loaded), ``made`` (Unix time).
- ``session``, each time a process begins to write: settings that may change without changing the tokens,
  versions, numerics, and which text file it writes (``number``, and ``start``, its first character).
- ``tokens``: ``ids``; ``sources``, a letter for each; ``chars``, characters of each; ``text``; ``steps``, a
  list ``[tokens, drafted, accepted, n-grams accepted, γ, ms since the first step]`` for each; ``seconds`` by
  phase and ``passes`` (draft passes), both since the session began; ``stream``, the state of the
  detokeniser; ``loop``, the first loop seen.
- ``end``: ``reason``, ``tail`` (text that was held back), ``metrics``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tokenswift.runs.journal import Record
from tokenswift.types import InputError, Loop, Step

#: how a token came about → its letter
SOURCES = {"target": "t", "head": "h", "ngram": "n", "chain": "c"}


def sources_of(step: Step) -> str:
    """A letter for each token of a step; "t" for all where nobody says."""
    named = step.sources or ("target",) * len(step.token_ids)
    return "".join(SOURCES[name] for name in named)


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

    header: Record
    sessions: list[Record] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sources: str = ""
    chars: list[int] = field(default_factory=list)
    text: str = ""
    before_last: int = 0
    steps: list[list[list[int]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    stream: dict[str, Any] | None = None
    loop: Loop | None = None
    end: Record | None = None

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self.header["prompt"]

    @property
    def session(self) -> Record:
        """The newest session."""
        return self.sessions[-1]

    @property
    def tail(self) -> str:
        """Text that the end released."""
        return self.end["tail"] if self.end else ""

    @property
    def all_steps(self) -> list[list[int]]:
        """The steps of all sessions."""
        return [step for session in self.steps for step in session]

    def finished(self, most: int, on_loop: str) -> str | None:
        """Why there is nothing to add, None when there is.

        Args:
            most: new tokens at most, now.
            on_loop: what a loop does, now.
        """
        eos: Collection[int] = self.header["identity"]["eos"]
        if self.stream is not None and self.stream["stopped"]:
            return "stop"
        if self.tokens and self.tokens[-1] in eos:
            return "eos"
        if on_loop == "stop" and self._stopped_by_loop():
            return "loop"
        return "length" if len(self.tokens) >= most else None

    def _stopped_by_loop(self) -> bool:
        if self.end is not None and self.end["reason"] == "loop":
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
    state = RunState(records[0])
    texts: list[str] = []
    length = 0
    base: dict[str, float] = {}
    base_passes = 0
    try:
        for record in records[1:]:
            kind = record["kind"]
            if kind == "session":
                state.sessions.append(record)
                state.steps.append([])
                base, base_passes = dict(state.seconds), state.passes
            elif kind == "tokens":
                state.tokens += record["ids"]
                state.sources += record["sources"]
                state.chars += record["chars"]
                state.before_last = length
                length += len(record["text"])
                texts.append(record["text"])
                state.steps[-1] += record["steps"]
                state.stream = record["stream"]
                for phase, value in record["seconds"].items():
                    state.seconds[phase] = base.get(phase, 0.0) + value
                state.passes = base_passes + record["passes"]
                if record.get("loop"):
                    state.loop = Loop(**record["loop"])
                state.end = None
            elif kind == "end":
                state.end = record
            else:
                raise InputError(f"{name} holds a record of the unknown kind {kind!r}")
    except (KeyError, TypeError) as error:
        raise InputError(f"{name} holds a record that lacks {error}; valid: a run's journal") from error
    state.text = "".join(texts)
    return state
