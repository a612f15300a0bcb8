"""Where a run stands, from its journal: tokens and text so far, figures, and how it ended.

Kinds of records (key ``kind``): ``header``, the first; ``session``, each time a process begins to write;
``tokens``; ``end``. What they may hold is said by name, type and range; nothing else is read, for a run's
folder may come from anybody. So no field is a path that is written to, and words that reach a terminal hold
no control characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tokenswift.checks import check_choice
from tokenswift.config import ADJUSTING, OPTIONS, SamplingParams, shown
from tokenswift.runs.journal import Record
from tokenswift.spec.drafters.base import MARKS
from tokenswift.types import InputError, Loop, Step

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
When = Annotated[float, Meta(ge=0, lt=253_402_000_000)]  # Unix time, up to the year 9999
File = Annotated[int, Meta(ge=1, le=10**6)]  # number of a text file
T = TypeVar("T")
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]

#: parts of a run's identity of which both values are said, and words for those whose name is none
SAID = ("dtype", "activations", "kv_cache_dtype", "acceptance", "stop", "eos", "rope")
WORDS = {
    "eos": "the end-of-text tokens (ignore_eos)",
    "rope": "rope_scaling",
    "config": "the model's config",
    "weights": "the model's weights",
    "tokenizer": "the tokenizer",
    "prompt": "the prompt",
}
#: what an identity leaves out
USUAL = {"activations": "float", "kv_cache_dtype": "auto"}


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A record, or a part of one, that has its own fields alone."""


class Identity(Strict):
    """What decides the tokens; see `loader.identity` and `runs.state.check_same`."""

    dtype: Word
    config: Word
    weights: Word
    adapter: None
    tokenizer: Word | None
    rope: Word
    sampling: dict[str, bool | int | float | list[str | list[int | float]] | dict[str, str] | None]
    eos: list[Token]
    stop: list[Annotated[str, Meta(min_length=1)] | Annotated[list[Token], Meta(min_length=1)]]
    acceptance: Literal["exact", "published"]
    stored: Word | None = None
    activations: Word | None = None
    kv_cache_dtype: Word | None = None

    def __post_init__(self) -> None:
        made = asdict(self.params)
        if missing := made.keys() - self.sampling.keys() - {*ADJUSTING}:
            raise ValueError(f"sampling lacks {', '.join(sorted(missing))}")

    @property
    def params(self) -> SamplingParams:
        """The sampling."""
        given: dict[str, Any] = dict(self.sampling)
        return SamplingParams(**given)


class Loading(Strict):
    """How the model was loaded: arguments of ``LLM``."""

    model: Word
    dtype: Word
    device: Word
    heads: Word | None
    rope_scaling: Word | None
    weights: Word
    activations: Word
    kv_cache_dtype: Word
    backend: Word
    cuda_graphs: Word
    eagle: Word | None


class Header(Strict, tag_field="kind", tag="header"):
    """The first record: ``made`` is Unix time; ``model`` is None where a program gave the model; ``asked`` is
    a digest of the conversation that the prompt was made of, if it was."""

    made: When
    name: Word
    model: Loading | None
    identity: Identity
    prompt: Annotated[list[Token], Meta(min_length=1)]
    asked: Word | None = None


class Session(Strict, tag_field="kind", tag="session"):
    """A process began to write: settings that may change without changing the tokens, and which text file it
    writes (``number``) from which character on (``start``)."""

    time: When
    pid: Count
    max_new_tokens: Positive
    strategy: Word
    options: dict[Word, bool | int | float | Word | list[bool | int | float | Word] | None]
    on_loop: Literal["report", "stop"]
    ignore_eos: bool
    numerics: dict[Word, bool | int | float | Word | None]
    threads: Positive
    versions: dict[Word, Word]
    number: File
    start: Count

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, tuple(OPTIONS))
        for name, kind in (("equal_bits", bool), ("how", str), ("device", str), ("processor", str)):
            if not isinstance(self.numerics.get(name), kind):
                raise ValueError(f"numerics lacks {name}")


class Stream(Strict):
    """State of the detokeniser; see `engine.detokenize.TextStream`."""

    window: list[Token]
    shown: str
    waiting: Count
    held: str
    stopped: bool


class SeenLoop(Strict):
    """A `types.Loop`."""

    start: Count
    size: Count
    span: Count
    sign: Literal["pattern", "n-grams"]


class Tokens(Strict, tag_field="kind", tag="tokens"):
    """Accepted tokens: a letter (source) and a number of characters for each, and their text; figures of each
    step, ``[tokens, drafted, accepted, n-grams accepted, γ, ms since the first step]``; seconds by phase and
    draft passes since the session began; the detokeniser's state behind them; the first loop seen."""

    ids: list[Token]
    sources: Annotated[str, Meta(pattern=r"^[thncgerA-Z]*\Z")]
    chars: list[Count]
    text: str
    steps: list[tuple[Positive, Count, Count, Count, Count, Count]]
    seconds: dict[Word, Seconds]
    passes: Count
    stream: Stream
    loop: SeenLoop | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.sources), len(self.chars), sum(step[0] for step in self.steps)}
        if len(lengths) > 1 or sum(self.chars) != len(self.text):
            raise ValueError("ids, sources, chars, text and steps do not fit each other")


class End(Strict, tag_field="kind", tag="end"):
    """The run ended: ``tail`` is text that was held back."""

    reason: Literal["length", "eos", "stop", "loop"]
    tail: str
    number: File
    time: When
    metrics: dict[str, Any]


def typed(record: dict[str, Any], kind: type[T] | UnionType) -> T:
    """A record as one of some kinds.

    Raises:
        ValueError: in one line, what is wrong with it, and where.
    """
    try:
        return msgspec.convert(record, kind)
    except (ValueError, TypeError, RecursionError) as error:  # also of names that are half a character
        text = "".join(filter(str.isprintable, str(error).encode("ascii", "backslashreplace").decode()))
        found = re.fullmatch(r"(.*?) - at `\$\.?(.*)`", text)
        raise ValueError(f"{found[2]}: {found[1]}"[:200] if found else text[:200]) from None


def sources_of(step: Step) -> str:
    """A letter for each token of a step; "t" for all where nobody says."""
    named = step.sources or ("target",) * len(step.token_ids)
    return "".join(MARKS[name].letter for name in named)


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
            found.append(f"{WORDS.get(key, key)} is {shown(given)}, was {shown(was)}")
        else:
            found.append(f"{WORDS.get(key, key)} differs")
    if found:
        raise InputError(
            f"run_dir {folder} holds another run: {'; '.join(sorted(found))}; valid: what the run "
            f"began with, or another folder"
        )
