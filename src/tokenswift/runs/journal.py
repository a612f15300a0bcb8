"""The journal of a run: an append-only file of checksummed records. And the regular files of its folder,
which may come from anybody: nothing else may be there, and nothing is reached through a link.

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
import stat
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from tokenswift.config import shown
from tokenswift.files import sync
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


def encode(records: Sequence[Record], checksum: int) -> tuple[bytes, int]:
    """Records as lines behind a record with a checksum, and the last one's checksum."""
    lines = []
    for record in records:
        payload = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        data = payload.encode("utf-8", errors="surrogatepass")
        length = b"%08x" % len(data)
        checksum = zlib.crc32(data, zlib.crc32(length, checksum))
        lines.append(b"%s %08x %s\n" % (length, checksum, data))
    return b"".join(lines), checksum


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
        raise InputError(f"{path} cannot be read ({error.strerror or error}); valid: a journal") from error
    return decode(data, str(path))


def create(path: Path, records: Sequence[Record]) -> None:
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
        self.path = path
        self._checksum, self._good = contents.checksum, contents.good
        self._file = open_regular(path, os.O_WRONLY)
        self._cut()

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._good)
        self._file.seek(self._good)

    def append(self, *records: Record) -> None:
        """Write and sync records. After a failure the file is as it was before.

        Raises:
            OSError: as the system says (no space left).
        """
        data, checksum = encode(records, self._checksum)
        try:
            write_all(self._file, data)
            sync(self._file.fileno())
        except OSError:
            self._cut()
            raise
        self._good += len(data)
        self._checksum = checksum

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_entries(folder: Path) -> list[str]:
    """The names in a run's folder, sorted; none where there is no folder.

    Raises:
        InputError: a link, a pipe, a device or a socket is among them.
        OSError: as the system says.
    """
    try:
        found = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    for path in found:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            check_regular(path)
    return [path.name for path in found]


def check_regular(path: Path) -> None:
    """Refuse what is there unless it is a regular file; nothing may be there.

    Raises:
        InputError: naming what it is.
    """
    with suppress(FileNotFoundError):
        _check(path, os.lstat(path), False)


def open_regular(path: Path, flags: int) -> FileIO:
    """A regular file, open for reading or for writing.

    Raises:
        InputError: it is none, or it is to be written and has a second name.
        OSError: as the system says.
    """
    check_regular(path)  # opening a device or a pipe can have effects of its own
    reads = flags & os.O_ACCMODE == os.O_RDONLY
    file = FileIO(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644), "rb" if reads else "wb")
    try:
        _check(path, os.fstat(file.fileno()), not reads)
    except BaseException:
        file.close()
        raise
    return file


def _check(path: Path, found: os.stat_result, writes: bool) -> None:
    what = None
    if stat.S_ISLNK(found.st_mode):
        what = "a link"
    elif not stat.S_ISREG(found.st_mode):
        what = "no regular file"
    elif writes and found.st_nlink > 1:
        what = "one file with another (a hard link)"
    if what is not None:
        raise InputError(
            f"run_dir {path.parent} holds {shown(path.name)}, which is {what}; valid: a folder of a "
            f"run's own files, regular ones"
        )


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises: as :func:`open_regular`.
    """
    with open_regular(path, os.O_RDONLY) as file:
        return file.readall()


def write_all(file: FileIO, data: bytes) -> None:
    """Write bytes to a file, however many the system takes at a time.

    Raises:
        OSError: as the system says (no space left).
    """
    at = 0
    while at < len(data):
        at += file.write(data[at:])


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
        with open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            write_all(file, data)
            sync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)  # the name has to last as well
    try:
        sync(handle)
    finally:
        os.close(handle)
