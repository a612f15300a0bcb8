"""The journal of a run: an append-only file of checksummed records.

The first line names the format's version. Every further line is one record::

    LENGTH CHECKSUM {"kind": …}\\n

LENGTH is the payload's bytes and CHECKSUM the CRC-32 of LENGTH and payload, begun with the checksum of the
record before (so a lost or moved line is noticed too); both are eight hexadecimal digits. The payload is
one JSON object without a raw newline. A file that ends inside a record has a *torn tail*: what a killed
process or a power cut leaves. Anything else that does not fit is damage, and is never guessed at.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.runs.regular import check_regular, open_regular, read_regular
from tokenswift.types import InputError

VERSION = 1
MAGIC = b"tokenswift journal "
FIRST = MAGIC + b"%d\n" % VERSION
HEAD = 18  # two numbers of eight digits, each with a blank
_BEGUN = re.compile(rb"[0-9a-f]{0,8}|[0-9a-f]{8} [0-9a-f]{0,8}|[0-9a-f]{8} [0-9a-f]{8} [^\n]*")

Record = dict[str, Any]


@dataclass(slots=True)
class Contents:
    """What a journal holds.

    Attributes:
        records: the whole records, in order.
        good: bytes up to the end of the last of them.
        torn: bytes of a torn tail behind it.
        damaged: bytes behind it that are neither records nor a torn tail.
        checksum: that of the last record, for the next one.
    """

    records: list[Record]
    good: int
    torn: int
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
        found = re.fullmatch(rb"tokenswift journal (\d{1,9})\n", line)
        if found:
            raise InputError(f"{name} is of version {int(found[1])}; valid: version {VERSION}")
        raise InputError(f"{name} is no journal of tokenswift; valid: one made with --run-dir")
    records: list[Record] = []
    at, checksum = len(FIRST), 0
    while at < len(data):
        found = _one(data, at, checksum)
        if found is None:
            rest = len(data) - at
            torn = _is_torn(data[at:])
            return Contents(records, at, rest if torn else 0, 0 if torn else rest, checksum)
        record, at, checksum = found
        records.append(record)
    return Contents(records, at, 0, 0, checksum)


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


def _is_torn(rest: bytes) -> bool:
    """Whether bytes are the beginning of one record, cut off (zeros behind it are blocks never written)."""
    rest = rest.rstrip(b"\0")
    if not _BEGUN.fullmatch(rest):
        return False
    return len(rest) < HEAD or len(rest) <= HEAD + int(rest[:8], 16)


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


def create(path: Path, records: list[Record]) -> None:
    """Make a journal with its first records: whole or not at all.

    Raises:
        OSError: as the system says.
    """
    lines, checksum = [FIRST], 0
    for record in records:
        line, checksum = encode(record, checksum)
        lines.append(line)
    write_whole(path, b"".join(lines))


def write_whole(path: Path, data: bytes) -> None:
    """Write a regular file whole or not at all: part file, sync, rename, sync of the folder.

    Raises:
        InputError: something else is there.
        OSError: as the system says.
    """
    check_regular(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)  # of a process that died, or a link
    try:
        with os.fdopen(open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable, where the system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        lines, checksum = [], self._checksum
        for record in records:
            line, checksum = encode(record, checksum)
            lines.append(line)
        data = b"".join(lines)
        try:
            at = 0
            while at < len(data):
                at += os.write(self._file, data[at:])
            os.fsync(self._file)
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
