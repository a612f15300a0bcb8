"""Records of a journal, and the state of a run that they add up to.

Kinds of records (key ``kind``): ``header``, the first; ``session``, each time a process begins to
write; ``tokens``, the last of which says how the text ended. What they may hold is said by name,
type and range; nothing else is read. So no field is a path that is written to, and words that reach
a terminal hold no control characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from tokenswift.checks import check_choice, shown
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import OPTIONS
from tokenswift.types import InputError, Litany, Loop, Step

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
When = Annotated[float, Meta(ge=0, lt=253_402_000_000)]  # Unix time, up to the year 9999
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
MOST_OPENING = 200  # characters of a litany's opening
LONG = ("config", "weights", "tokenizer", "prompt")  # of these it is only said that they differ
#: which positions a run has, where its model has others for long texts
Positions: TypeAlias = Literal["short", "long"]
SHORT_POSITIONS: Final = "short"
LONG_POSITIONS: Final = "long"


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A record, or a part of one, that has its own fields alone."""


class Identity(Strict):
    """What decides the tokens; see `loader.identity` and `runs.records.check_same`."""

    dtype: Word
    config: Word
    weights: Word
    tokenizer: Word | None
    rope: Word
    sampling: dict[str, bool | int | float | list[str | list[int | float]] | dict[str, str] | None]
    eos: list[Token]
    stop: list[Annotated[str, Meta(min_length=1)] | Annotated[list[Token], Meta(min_length=1)]]
    acceptance: Literal["exact", "published"]
    activations: Word | None = None
    kv_cache_dtype: Word | None = None
    int16_keys: Word | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        _ = self.params  # it is one

    @property
    def params(self) -> SamplingParams:
        """The sampling."""
        settings: dict[str, Any] = dict(self.sampling)  # which checks them
        return SamplingParams(**settings)


class Loading(Strict):
    """How the model was loaded: arguments of ``LLM``."""

    model: Word
    dtype: Word
    device: Word
    heads: Word | None
    rope_scaling: Word | None
    weights: Word
    kv_cache_dtype: Word
    backend: Word
    eagle: Word | None


class Header(Strict, tag_field="kind", tag="header"):
    """The first record: ``made`` is Unix time; ``model`` is None where a program gave the model;
    ``asked`` is a digest of the conversation that the prompt was made of, if it was."""

    made: When
    name: Word
    model: Loading | None
    identity: Identity
    prompt: Annotated[list[Token], Meta(min_length=1)]
    asked: Word | None = None


class Session(Strict, tag_field="kind", tag="session"):
    """A process began to write: settings that may change without changing the tokens."""

    time: When
    pid: Count
    max_new_tokens: Positive
    strategy: Word
    options: dict[Word, bool | int | float | Word | list[bool | int | float | Word] | None]
    on_loop: Literal["report", "stop", "copies"]
    ignore_eos: bool
    numerics: dict[Word, bool | int | float | Word | None]
    threads: Positive
    versions: dict[Word, Word]
    #: as `SamplingParams.min_tokens`, in place of the header's; None: as before
    min_tokens: Count | None = None

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, tuple(OPTIONS))


#: why a text ended
EndReason: TypeAlias = Literal["length", "eos", "stop", "loop"]


class End(Strict):
    """How a text ended: ``tail`` is text that was held back."""

    reason: EndReason
    tail: str


class Tokens(Strict, tag_field="kind", tag="tokens"):
    """Accepted tokens: a letter (source) and a number of characters for each, and their text;
    figures of each step, ``[tokens, drafted, accepted, n-grams accepted, γ, ms]``; seconds by phase
    and draft passes of the run so far; the first loop seen; the end, where they are the last."""

    ids: list[Token]
    sources: Annotated[str, Meta(pattern=r"^[thncger]*\Z")]
    chars: list[Count]
    text: str
    steps: list[tuple[Positive, Count, Count, Count, Count, Count]]
    seconds: dict[Word, Seconds]
    passes: Count
    loop: Loop | None = None
    end: End | None = None
    litany: Litany | None = None

    def __post_init__(self) -> None:
        lengths = {
            len(self.ids),
            len(self.sources),
            len(self.chars),
            sum(step[0] for step in self.steps),
        }
        if len(lengths) > 1 or sum(self.chars) != len(self.text):
            raise ValueError("ids, sources, chars, text and steps do not fit each other")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step, besides its tokens.

    Attributes:
        seconds: by phase, of the run so far.
        passes: draft passes of the run so far.
        loop: the first loop that was seen.
        end: how the text ended; None while it goes on.
        litany: the first litany that was seen.
    """

    seconds: dict[str, float]
    passes: int
    loop: Loop | None
    end: End | None
    litany: Litany | None = None


Record: TypeAlias = Header | Session | Tokens


def sources_of(step: Step) -> str:
    """A letter for each token of a step; "t" for all where nobody says."""
    named = step.sources or ("target",) * len(step.token_ids)
    return "".join(name[0] for name in named)


@dataclass(slots=True)
class RunState:
    """A run so far.

    Attributes:
        header: the journal's first record.
        sessions: records of the processes that wrote it.
        tokens, sources, chars: new tokens, a letter and a number of characters for each.
        text: their text, without ``tail``.
        steps: the figures of each step.
        seconds: by phase, of all sessions.
        passes: draft passes.
        loop: the first loop that was seen.
        litany: the first litany that was seen.
        end: how it ended; None while it goes on.
    """

    header: Header
    sessions: list[Session] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sources: str = ""
    chars: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[tuple[int, ...]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    loop: Loop | None = None
    end: End | None = None
    litany: Litany | None = None

    @property
    def session(self) -> Session:
        """The newest session."""
        return self.sessions[-1]

    @property
    def min_tokens(self) -> int:
        """New tokens before the text may end, as the newest session that says so has it."""
        for session in reversed(self.sessions):
            if session.min_tokens is not None:
                return session.min_tokens
        return self.header.identity.params.min_tokens

    @property
    def tail(self) -> str:
        """Text that the end released."""
        return self.end.tail if self.end else ""

    def take(self, record: Tokens) -> None:
        """Add a record of tokens.

        Raises:
            ValueError: what it says of the tokens so far cannot be.
        """
        self.tokens += record.ids
        self.sources += record.sources
        self.chars += record.chars
        self.steps += record.steps
        self.text += record.text
        self.seconds = record.seconds
        self.passes = record.passes
        self.end = record.end
        loop = record.loop
        if loop is not None and not 0 <= loop.start <= loop.start + loop.span <= len(self.tokens):
            raise ValueError("loop: it is not in the text")
        self.loop = loop or self.loop
        litany = record.litany
        if litany is not None:
            if not 0 <= litany.start <= litany.start + litany.span <= len(self.tokens):
                raise ValueError("litany: it is not in the text")
            if len(litany.opening) > MOST_OPENING or not litany.opening.isprintable():
                raise ValueError("litany: its opening is no two words")
        self.litany = litany or self.litany

    def take_back_end(self, min_tokens: int | None) -> None:
        """Let the text go on where the model ended it before ``min_tokens`` new tokens: its end
        mark, the last token, is no part of it any more."""
        if self.end is None or self.end.reason != "eos" or not self.tokens:
            return
        if len(self.tokens) > (min_tokens or 0):
            return
        self.tokens.pop()
        self.chars.pop()
        self.sources = self.sources[:-1]
        count, *figures = self.steps[-1]
        self.steps[-1] = (count - 1, *figures)
        self.end = None


def replay(records: Sequence[object], name: str = "the journal") -> RunState:
    """The state that a journal's records lead to.

    Raises:
        InputError: records that are complete but make no run.
    """
    header = records[0] if len(records) > 1 else None
    if not isinstance(header, Header) or not isinstance(records[1], Session):
        raise InputError(f"{name} does not begin with a run's header; valid: a run's journal")
    state = RunState(header)
    for number, record in enumerate(records[1:], 2):
        try:
            if isinstance(record, Tokens):
                state.take(record)
            elif isinstance(record, Session):
                state.sessions.append(record)
                state.take_back_end(record.min_tokens)
            else:
                raise ValueError("a second header")
        except ValueError as error:
            wrong = f"record {number}, {error}"
            raise InputError(
                f"{name} holds what no run writes ({wrong}); valid: a run's journal"
            ) from None
    return state


def check_readable(folder: str, records: Sequence[Header | Session]) -> None:
    """See that a journal that begins with these records could be read again.

    Args:
        folder: the run's, for the message.
    Raises:
        InputError: a name in them, such as a model's path, is none that a journal takes.
    """
    for record in records:
        try:
            msgspec.json.decode(msgspec.json.encode(record, enc_hook=str), type=Record)
        except msgspec.MsgspecError as error:
            place = re.search(r"`\$\.([\w.]+)", str(error))
            field = place[1] if place else str(error)
            raise InputError(
                f"run_dir {folder} cannot keep this run: its journal takes no such {field}; valid: "
                f"names without control characters"
            ) from error


def deciding_values(header: Header) -> dict[str, object]:
    """What decides a run's tokens, by name."""
    values: dict[str, object] = msgspec.structs.asdict(header.identity)
    del values["sampling"]
    return {**values, **asdict(header.identity.params), "prompt": header.prompt}


def check_same(folder: str, before: Header, now: Header, min_tokens: int | None = None) -> None:
    """See that what decides a run's tokens is what it was; ``min_tokens`` may grow.

    Args:
        folder: the run's, for the message.
        before: the header that the journal has.
        now: the header that would begin it now.
        min_tokens: of the run's newest session; None: the journal's header says it.
    Raises:
        InputError: naming everything that differs, with both values where they are short.
    """
    was = deciding_values(before)
    given_now = deciding_values(now)
    if min_tokens is None:
        min_tokens = before.identity.params.min_tokens
    was["min_tokens"] = max(min_tokens, now.identity.params.min_tokens)
    same_dtype = was["dtype"] == given_now["dtype"]
    differences: list[str] = []
    for key in sorted(was):
        if was[key] == given_now[key]:
            continue
        if key == "weights" and not same_dtype:
            continue  # they have other values in another dtype: that is said once
        if key == "int16_keys" and was[key] is None and same_dtype and was["dtype"] == "int8":
            change = "are new: the run was written by an earlier version, whose int8 is another"
        elif key in LONG:
            change = "differs"
        else:
            change = f"is {shown(given_now[key])}, was {shown(was[key])}"
        differences.append(f"{key} {change}")
    if differences:
        raise InputError(
            f"run_dir {folder} holds another run: {'; '.join(differences)}; valid: what the run "
            "began with, or another folder"
        )
