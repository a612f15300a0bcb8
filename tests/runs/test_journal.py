"""The journal's bytes: whole records count, up to the first that is not; damage is never overlooked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tokenswift.runs import journal
from tokenswift.types import InputError

RECORDS = [{"kind": "a", "text": "ein\nzwei — 日本"}, {"kind": "b", "n": list(range(30))}, {"kind": "c"}]


def made(tmp_path: Path) -> tuple[Path, bytes]:
    path = tmp_path / "journal"
    journal.create(path, RECORDS)
    return path, path.read_bytes()


@pytest.mark.parametrize("zeros", [0, 4096])
def test_an_unfinished_record_of_every_length(tmp_path: Path, zeros: int) -> None:
    """However much of the last record is there: the records before it are whole, the rest is cut off."""
    path, data = made(tmp_path)
    last = data.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(data), 3):
        path.write_bytes(data[:end] + b"\0" * zeros)
        contents = journal.read(path)
        assert contents.records == RECORDS[:2] and contents.good == last and contents.damaged == 0
    journal.Appender(path, contents).close()
    assert path.read_bytes() == data[:last]


def test_a_flipped_byte_anywhere_is_damage(tmp_path: Path) -> None:
    """Every bit of every record counts, the last record's too; what is good before it is told."""
    path, data = made(tmp_path)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for at in range(ends[0], len(data)):
        for bit in (0, 3, 7) if at % 7 else range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            contents = journal.decode(bytes(broken))
            good = sum(end <= at for end in ends) - 1
            assert contents.records == RECORDS[:good] and contents.good == ends[good], (at, bit)
            assert contents.damaged == len(data) - ends[good], (at, bit)


def test_lost_and_exchanged_records_are_damage(tmp_path: Path) -> None:
    _, data = made(tmp_path)
    lines = data.splitlines(keepends=True)
    for changed in ([0, 2, 3], [0, 2, 1, 3], [0, 1, 1, 2, 3], [0, 1, 3]):
        contents = journal.decode(b"".join(lines[i] for i in changed))
        assert contents.damaged and contents.records == RECORDS[: 1 if changed[1] == 1 else 0]


def test_other_versions_and_other_files(tmp_path: Path) -> None:
    path, data = made(tmp_path)
    path.write_bytes(data.replace(b"journal 0.1\n", b"journal 2\n"))
    with pytest.raises(InputError, match=r"journal is of version 2; valid: version 0\.1$"):
        journal.read(path)
    for other in (b"", b"hello", b"tokenswift journal x\n", data[5:]):
        path.write_bytes(other)
        with pytest.raises(InputError, match="is not a journal of tokenswift"):
            journal.read(path)
    with pytest.raises(InputError, match="cannot be read"):
        journal.read(tmp_path / "none")


def test_a_write_that_fails_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    """The disk is full in the middle of a record."""
    path, data = made(tmp_path)
    more = journal.Appender(path, journal.read(path))
    real, room = journal.FileIO.write, [20]

    class Full(journal.FileIO):
        def write(self, content: Any) -> int:
            if not room:
                raise OSError(28, "No space left on device")
            return real(self, content[: room.pop()])

    file, more._file = more._file, Full(os.dup(more._file.fileno()), "wb")
    with pytest.raises(OSError, match="No space left"):
        more.append({"kind": "d", "text": "x" * 100})
    more.close()
    more._file = file
    assert path.read_bytes() == data
    more.append({"kind": "d"})
    assert journal.read(path).records == [*RECORDS, {"kind": "d"}]
    more.close()


def test_whole_files_are_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    journal.write_whole(path, b"old")
    monkeypatch.setattr(journal.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        journal.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
