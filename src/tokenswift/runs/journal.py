"""The journal of a run: an append-only file of checksummed records, which say where the run stands:
tokens, text, figures, and how it ended.

The first line names the minor version of the library that wrote it; others refuse it. Every further
line is one record::

    LENGTH CHECKSUM {"kind": …}\\n

LENGTH is the payload's bytes and CHECKSUM the CRC-32 of LENGTH and payload, begun with the checksum
of the record before (so a lost or moved line is noticed too); both are eight hexadecimal digits.
The payload is one JSON object without a raw newline.

One rule says what counts: the longest prefix of complete records. A killed process or a power cut
leaves the beginning of one record behind it, which the next one overwrites; whatever else is there
is *damage*, which stays until the user cuts it off.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenswift.runs.regular_files import open_regular, read_regular, write_all, write_whole
from tokenswift.types import InputError
from tokenswift.version import __version__

VERSION = ".".join(__version__.split(".")[:2])
MAGIC = b"tokenswift journal "
FIRST = MAGIC + VERSION.encode() + b"\n"
HEAD = 18  # two numbers of eight digits, each with a blank


@dataclass(slots=True)
class Contents:
    """What a journal holds.

    Attributes:
        records: the complete records, in order.
        good: bytes up to the end of the last of them.
        damaged: bytes behind it, where they are more than the beginning of one record.
        checksum: that of the last record, for the next one.
    """

    records: list[object]
    good: int
    damaged: int
    checksum: int


def encode(records: Sequence[object], checksum: int) -> tuple[bytes, int]:
    """Records as lines behind a record with a checksum, and the last one's checksum."""
    lines = []
    for record in records:
        data = msgspec.json.encode(record, enc_hook=str)  # torch has strings of a type of its own
        length = b"%08x" % len(data)
        checksum = zlib.crc32(data, zlib.crc32(length, checksum))
        lines.append(b"%s %08x %s\n" % (length, checksum, data))
    return b"".join(lines), checksum


def decode(data: bytes, kind: object = dict[str, object], name: str = "the journal") -> Contents:
    """The records of a journal's bytes.

    Args:
        kind: type of a record, by which it is checked.
        name: of the journal, for messages.
    Raises:
        InputError: no journal, one of another version, or a complete record of another type.
    """
    line = data[: data.find(b"\n") + 1]
    if line != FIRST:
        other = re.fullmatch(rb"tokenswift journal ([\d.]{1,9})\n", line)
        if other is not None:
            raise InputError(f"{name} is of version {other[1].decode()}; valid: version {VERSION}")
        raise InputError(f"{name} is not a journal of tokenswift; valid: one made with --run-dir")
    records: list[object] = []
    position = len(FIRST)
    checksum = 0
    while True:
        line_read = _next_line(data, position, checksum)
        if line_read is None:
            break
        position = line_read.end
        checksum = line_read.checksum
        try:
            records.append(msgspec.json.decode(line_read.payload, type=kind))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = "".join(filter(str.isprintable, str(error)))[:200]
            wrong = f"record {len(records) + 1}, {why}"
            raise InputError(
                f"{name} holds what no run writes ({wrong}); valid: a run's journal"
            ) from None
    remainder = data[position:]
    damaged = 0 if _is_unfinished(remainder) else len(remainder)
    return Contents(records, position, damaged, checksum)


@dataclass(frozen=True, slots=True)
class Line:
    """A complete line of a journal.

    Attributes:
        payload: the record's bytes.
        end: the position behind the line.
        checksum: the record's, for the next one.
    """

    payload: bytes
    end: int
    checksum: int


def _next_line(data: bytes, position: int, checksum: int) -> Line | None:
    """The line at a position, behind a record with this checksum; None when no complete one is
    there."""
    try:
        length = int(data[position : position + 8], 16)
    except ValueError:
        return None
    start = position + HEAD
    end = start + length
    payload = data[start:end]
    own_checksum = zlib.crc32(payload, zlib.crc32(data[position : position + 8], checksum))
    head = b"%08x %08x " % (length, own_checksum)
    if data[end : end + 1] != b"\n" or data[position:start] != head:
        return None
    return Line(payload, end + 1, own_checksum)


def _is_unfinished(data: bytes) -> bool:
    """Whether bytes are the beginning of one record (zeros behind it are blocks that were never
    written)."""
    data = data.rstrip(b"\0")
    if b"\n" in data:
        return False
    if len(data) < HEAD:
        return True
    length = re.match(rb"[0-9a-f]{8} ", data)
    return length is not None and len(data) <= HEAD + int(length[0], 16)


def read(path: Path, kind: object = dict[str, object]) -> Contents:
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


def create(path: Path, records: Sequence[object]) -> None:
    """Make a journal with its first records: completely or not at all.

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
        self._checksum = contents.checksum
        self._good = contents.good
        self._file = open_regular(path, os.O_WRONLY)
        self._cut()

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._good)
        self._file.seek(self._good)

    def append(self, *records: object) -> None:
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
