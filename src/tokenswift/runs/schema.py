"""What the records of a journal may hold: every field by name, type and range; nothing else is read.

A run's folder may come from anybody. So no field is a path that is written to, and words that reach a
terminal hold no control characters.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tokenswift.checks import check_choice
from tokenswift.config import ADJUSTING, OPTIONS, LoopOptions, SamplingParams

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
When = Annotated[float, Meta(ge=0, lt=253_402_000_000)]  # Unix time, up to the year 9999
File = Annotated[int, Meta(ge=1, le=10**6)]  # number of a text file
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A record, or a part of one, that has its own fields alone."""


class Adapter(Strict):
    """What PEFT attached: names and digest."""

    names: list[Word]
    digest: Word


class Identity(Strict):
    """What decides the tokens; see `loader.identity` and `runs.state.check_same`."""

    dtype: Word
    config: Word
    weights: Word
    adapter: Adapter | None
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
    device_map: Word | dict[Word, Word | int] | None


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
    loop: dict[str, int]
    ignore_eos: bool
    numerics: dict[Word, bool | int | float | Word | None]
    threads: Positive
    versions: dict[Word, Word]
    number: File
    start: Count

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, tuple(OPTIONS))
        LoopOptions(**self.loop)
        for name, kind in (("equal_bits", bool), ("how", str), ("device", str), ("processor", str)):
            if not isinstance(self.numerics.get(name), kind):
                raise ValueError(f"numerics lacks {name}")


class Stream(Strict):
    """State of the detokeniser; see `engine.text.TextStream`."""

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
    sources: Annotated[str, Meta(pattern=r"^[thncgeA-Z]*\Z")]
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


T = TypeVar("T")


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
