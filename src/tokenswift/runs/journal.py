"""The journal of a run: an append-only file of checksummed records.

The first line names the minor version of the library that wrote it; others refuse it. Every further line is
one record::

    LENGTH CHECKSUM {"kind": …}\\n

LENGTH is the payload's bytes and CHECKSUM the CRC-32 of LENGTH and payload, begun with the checksum of the
record before (so a lost or moved line is noticed too); both are eight hexadecimal digits. The payload is
one JSON object without a raw newline.

One rule says what counts: the longest prefix of whole records. A killed process or a power cut leaves the
beginning of one record behind it, which the next one overwrites; whatever else is there is *damage*, which
stays until the user drops it.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.files import sync
from tokenswift.runs.regular import open_regular, read_regular, write_all, write_whole
from tokenswift.types import InputError
from tokenswift.version import __version__

VERSION = ".".join(__version__.split(".")[:2])
MAGIC = b"tokenswift journal "
FIRST = MAGIC + VERSION.encode() + b"\n"
HEAD = 18  # two numbers of eight digits, each with a blank

Record = dict[str, Any]


@dataclass(slots=True)
class Contents:
    """What a journal holds.

    Attributes:
        records: the whole records, in order.
        good: bytes up to the end of the last of them.
        damaged: bytes behind it, where they are more than the beginning of one record.
        checksum: that of the last record, for the next one.
    """

    records: list[Record]
    good: int
    damaged: int
    checksum: int


def encode(record: Record, checksum: int) -> tuple[bytes, int]:
    """A record as a line, and its checksum."""
    payload = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = payload.encode("utf-8", errors="surrogatepass")
    length = b"%08x" % len(data)
    checksum = zlib.crc32(data, zlib.crc32(length, checksum))
    return b"%s %08x %s\n" % (length, checksum, data), checksum


def decode(data: bytes, name: str = "the journal") -> Contents:
    """The records of a journal's bytes.

    Raises:
        InputError: no journal, or one of another version.
    """
    line = data[: data.find(b"\n") + 1]
    if line != FIRST:
        found = re.fullmatch(rb"tokenswift journal ([\d.]{1,9})\n", line)
        if found:
            raise InputError(f"{name} is of version {found[1].decode()}; valid: version {VERSION}")
        raise InputError(f"{name} is not a journal of tokenswift; valid: one made with --run-dir")
    records: list[Record] = []
    at, checksum = len(FIRST), 0
    while (found := _one(data, at, checksum)) is not None:
        record, at, checksum = found
        records.append(record)
    rest = data[at:]
    return Contents(records, at, 0 if _is_unfinished(rest) else len(rest), checksum)


def _one(data: bytes, at: int, checksum: int) -> tuple[Record, int, int] | None:
    """The record at a place, the place behind it and its checksum; None when there is no whole one."""
    try:
        length = int(data[at : at + 8], 16)
    except ValueError:
        return None
    start, end = at + HEAD, at + HEAD + length
    found = zlib.crc32(data[start:end], zlib.crc32(data[at : at + 8], checksum))
    if data[end : end + 1] != b"\n" or data[at:start] != b"%08x %08x " % (length, found):
        return None
    try:
        record = json.loads(data[start:end].decode("utf-8", errors="surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return (record, end + 1, found) if isinstance(record, dict) else None


def _is_unfinished(rest: bytes) -> bool:
    """Whether bytes are the beginning of one record (zeros behind it are blocks that were never written)."""
    rest = rest.rstrip(b"\0")
    length = re.match(rb"[0-9a-f]{8} ", rest)
    inside = len(rest) < HEAD or (length is not None and len(rest) <= HEAD + int(length[0], 16))
    return inside and b"\n" not in rest


def read(path: Path) -> Contents:
    """The contents of a journal file.

    Raises:
        InputError: it cannot be read, is no regular file, no journal, or one of another version.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); valid: a run's journal"
        ) from error
    return decode(data, str(path))


def _lines(records: Sequence[Record], checksum: int) -> tuple[bytes, int]:
    """Records as lines behind a record with a checksum, and the last one's checksum."""
    lines = []
    for record in records:
        line, checksum = encode(record, checksum)
        lines.append(line)
    return b"".join(lines), checksum


def create(path: Path, records: Sequence[Record]) -> None:
    """Make a journal with its first records: whole or not at all.

    Raises:
        OSError: as the system says.
    """
    write_whole(path, FIRST + _lines(records, 0)[0])


class Appender:
    """Appends records to a journal.

    Args:
        path: the journal.
        contents: what is in it; everything behind ``contents.good`` is cut off.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        self.path = path
        self._checksum, self._good = contents.checksum, contents.good
        self._file = open_regular(path, os.O_WRONLY)
        try:
            os.ftruncate(self._file, self._good)
            os.lseek(self._file, self._good, os.SEEK_SET)
        except OSError:
            self.close()
            raise

    def append(self, *records: Record) -> None:
        """Write and sync records. After a failure the file is as it was before.

        Raises:
            OSError: as the system says (no space left).
        """
        data, checksum = _lines(records, self._checksum)
        try:
            write_all(self._file, data)
            sync(self._file)
        except OSError:
            os.ftruncate(self._file, self._good)
            os.lseek(self._file, self._good, os.SEEK_SET)
            raise
        self._good += len(data)
        self._checksum = checksum

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
