"""The journal of a run: an append-only file of checksummed records, which say where the run stands:
tokens, text, figures, and how it ended. And the regular files of its folder, which may come from
anybody: nothing is reached through a link.

The first line names the minor version of the library that wrote it; others refuse it. Every further
line is one record::

    LENGTH CHECKSUM {"kind": …}\\n

LENGTH is the payload's bytes and CHECKSUM the CRC-32 of LENGTH and payload, begun with the checksum
of the record before (so a lost or moved line is noticed too); both are eight hexadecimal digits.
The payload is one JSON object without a raw newline.

One rule says what counts: the longest prefix of whole records. A killed process or a power cut
    leaves the
beginning of one record behind it, which the next one overwrites; whatever else is there is
*damage*, which stays until the user cuts it off.

Kinds of records (key ``kind``): ``header``, the first; ``session``, each time a process begins to
    write;
``tokens``, the last of which says how the text ended. What they may hold is said by name, type and
range; nothing else is read. So no field is a path that is written to, and words that reach a
terminal hold no control characters.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import OPTIONS
from tokenswift.files import replacing, sync
from tokenswift.types import InputError, Loop, Step, check_choice, shown
from tokenswift.version import __version__

VERSION = ".".join(__version__.split(".")[:2])
MAGIC = b"tokenswift journal "
FIRST = MAGIC + VERSION.encode() + b"\n"
HEAD = 18  # two numbers of eight digits, each with a blank
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
When = Annotated[float, Meta(ge=0, lt=253_402_000_000)]  # Unix time, up to the year 9999
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
LONG = ("config", "weights", "tokenizer", "prompt")  # of these it is only said that they differ


@dataclass(slots=True)
class Contents:
    """What a journal holds.

    Attributes:
        records: the whole records, in order.
        good: bytes up to the end of the last of them.
        damaged: bytes behind it, where they are more than the beginning of one record.
        checksum: that of the last record, for the next one.
    """

    records: list[Any]
    good: int
    damaged: int
    checksum: int


def encode(records: Sequence[Any], checksum: int) -> tuple[bytes, int]:
    """Records as lines behind a record with a checksum, and the last one's checksum."""
    lines = []
    for record in records:
        data = msgspec.json.encode(record, enc_hook=str)  # torch has strings of a type of its own
        length = b"%08x" % len(data)
        checksum = zlib.crc32(data, zlib.crc32(length, checksum))
        lines.append(b"%s %08x %s\n" % (length, checksum, data))
    return b"".join(lines), checksum


def decode(data: bytes, kind: Any = dict[str, Any], name: str = "the journal") -> Contents:
    """The records of a journal's bytes.

    Args:
        kind: type of a record, by which it is checked.
        name: of the journal, for messages.
    Raises:
        InputError: no journal, one of another version, or a whole record that is not of the type.
    """
    line = data[: data.find(b"\n") + 1]
    if line != FIRST:
        found = re.fullmatch(rb"tokenswift journal ([\d.]{1,9})\n", line)
        if found:
            raise InputError(f"{name} is of version {found[1].decode()}; valid: version {VERSION}")
        raise InputError(f"{name} is not a journal of tokenswift; valid: one made with --run-dir")
    records: list[Any] = []
    at, checksum = len(FIRST), 0
    while (found := _one(data, at, checksum)) is not None:
        payload, at, checksum = found
        try:
            records.append(msgspec.json.decode(payload, type=kind))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = "".join(filter(str.isprintable, str(error)))[:200]
            wrong = f"record {len(records) + 1}, {why}"
            raise InputError(
                f"{name} holds what no run writes ({wrong}); valid: a run's journal"
            ) from None
    rest = data[at:]
    return Contents(records, at, 0 if _is_unfinished(rest) else len(rest), checksum)


def _one(data: bytes, at: int, checksum: int) -> tuple[bytes, int, int] | None:
    """The record at a place, the place behind it and its checksum; None when there is no whole
    one."""
    try:
        length = int(data[at : at + 8], 16)
    except ValueError:
        return None
    start, end = at + HEAD, at + HEAD + length
    found = zlib.crc32(data[start:end], zlib.crc32(data[at : at + 8], checksum))
    if data[end : end + 1] != b"\n" or data[at:start] != b"%08x %08x " % (length, found):
        return None
    return data[start:end], end + 1, found


def _is_unfinished(rest: bytes) -> bool:
    """Whether bytes are the beginning of one record (zeros behind it are blocks that were never
    written)."""
    rest = rest.rstrip(b"\0")
    length = re.match(rb"[0-9a-f]{8} ", rest)
    inside = len(rest) < HEAD or (length is not None and len(rest) <= HEAD + int(length[0], 16))
    return inside and b"\n" not in rest


def read(path: Path, kind: Any = dict[str, Any]) -> Contents:
    """The contents of a journal file.

    Raises:
        InputError: as :func:`decode`, or it cannot be read, or is no regular file.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); valid: a journal"
        ) from error
    return decode(data, kind, str(path))


def create(path: Path, records: Sequence[Any]) -> None:
    """Make a journal with its first records: whole or not at all.

    Raises:
        OSError: as the system says.
    """
    write_whole(path, FIRST + encode(records, 0)[0])


class Appender:
    """Appends records to a journal.

    Args:
        path: the journal.
        contents: what is in it; everything behind ``contents.good`` is cut off.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        self._checksum, self._good = contents.checksum, contents.good
        self._file = open_regular(path, os.O_WRONLY)
        self._cut()

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._good)
        self._file.seek(self._good)

    def append(self, *records: Any) -> None:
        """Write and sync records. After a failure the file is as it was before.

        Raises:
            OSError: as the system says (no space left).
        """
        data, checksum = encode(records, self._checksum)
        try:
            write_all(self._file, data)
        except OSError:
            self._cut()
            raise
        self._good += len(data)
        self._checksum = checksum

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# ---- regular files -------------------------------------------------------------------------------


def check_regular(path: Path, handle: int | None = None) -> None:
    """Refuse what is there (or open) unless it is a regular file of that name alone; nothing may be
    there.

    Raises:
        InputError: naming it.
    """
    with suppress(FileNotFoundError):
        found = os.lstat(path) if handle is None else os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            what = (
                "a link" if stat.S_ISLNK(found.st_mode) or found.st_nlink > 1 else "no regular file"
            )
            raise InputError(
                f"run_dir {path.parent} holds {shown(path.name)}, which is {what}; valid: a "
                f"folder of a "
                f"run's own files, regular ones"
            )


def open_regular(path: Path, flags: int) -> FileIO:
    """A regular file, open for reading or for writing.

    Raises:
        InputError: it is none, or has a second name.
        OSError: as the system says.
    """
    check_regular(path)  # opening a device or a pipe can have effects of its own
    reads = flags & os.O_ACCMODE == os.O_RDONLY
    file = FileIO(
        os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644), "rb" if reads else "wb"
    )
    try:
        check_regular(path, file.fileno())
    except InputError:
        file.close()
        raise
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises: as :func:`open_regular`.
    """
    with open_regular(path, os.O_RDONLY) as file:
        return file.readall()


def write_all(file: FileIO, data: bytes) -> None:
    """Write bytes to a file, however many the system takes at a time, and sync it.

    Raises:
        OSError: as the system says (no space left).
    """
    at = 0
    while at < len(data):
        at += file.write(data[at:])
    sync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write a regular file whole or not at all: part file, sync, rename, sync of the folder.

    Raises:
        InputError: something else is there.
        OSError: as the system says.
    """
    check_regular(path)
    with replacing(path) as part:
        part.write_bytes(data)


# ---- records -------------------------------------------------------------------------------------


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A record, or a part of one, that has its own fields alone."""


class Identity(Strict):
    """What decides the tokens; see `loader.weights` and `runs.journal.check_same`."""

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

    def __post_init__(self) -> None:
        _ = self.params  # it is one

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
    on_loop: Literal["report", "stop"]
    ignore_eos: bool
    numerics: dict[Word, bool | int | float | Word | None]
    threads: Positive
    versions: dict[Word, Word]

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, tuple(OPTIONS))


class End(Strict):
    """How a text ended: ``tail`` is text that was held back."""

    reason: Literal["length", "eos", "stop", "loop"]
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

    def __post_init__(self) -> None:
        lengths = {
            len(self.ids),
            len(self.sources),
            len(self.chars),
            sum(step[0] for step in self.steps),
        }
        if len(lengths) > 1 or sum(self.chars) != len(self.text):
            raise ValueError("ids, sources, chars, text and steps do not fit each other")


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

    @property
    def session(self) -> Session:
        """The newest session."""
        return self.sessions[-1]

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
        self.seconds, self.passes, self.end = record.seconds, record.passes, record.end
        loop = record.loop
        if loop is not None and not 0 <= loop.start <= loop.start + loop.span <= len(self.tokens):
            raise ValueError("loop: it is not in the text")
        self.loop = loop or self.loop


def replay(records: Sequence[Any], name: str = "the journal") -> RunState:
    """The state that a journal's records lead to.

    Raises:
        InputError: records that are whole but make no run.
    """
    if [type(record) for record in records[:2]] != [Header, Session]:
        raise InputError(f"{name} does not begin with a run's header; valid: a run's journal")
    state = RunState(records[0])
    for number, record in enumerate(records[1:], 2):
        try:
            if isinstance(record, Tokens):
                state.take(record)
            elif isinstance(record, Session):
                state.sessions.append(record)
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


def check_same(folder: str, kept: Header, now: Header) -> None:
    """See that what decides a run's tokens is what it was.

    Args:
        folder: the run's, for the message.
        kept, now: the headers that the journal has and that would begin it now.
    Raises:
        InputError: naming everything that differs, with both values where they are short.
    """
    was, given = (
        {
            **msgspec.structs.asdict(one.identity),
            **asdict(one.identity.params),
            "prompt": one.prompt,
        }
        for one in (kept, now)
    )
    found = []
    for key in sorted(was.keys() - {"sampling"}):
        if was[key] == given[key] or (key == "weights" and was["dtype"] != given["dtype"]):
            continue  # other values in another dtype: said once
        values = "differs" if key in LONG else f"is {shown(given[key])}, was {shown(was[key])}"
        if key == "int16_keys" and was[key] is None and was["dtype"] == given["dtype"] == "int8":
            values = "are new: the run was written by an earlier version, whose int8 is another"
        found.append(f"{key} {values}")
    if found:
        raise InputError(
            f"run_dir {folder} holds another run: {'; '.join(found)}; valid: what the run began "
            f"with, or "
            f"another folder"
        )
