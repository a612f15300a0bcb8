"""The journal's bytes: whole records count, up to the first that is not; damage is never
overlooked."""

from __future__ import annotations

import os
import random
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tokenswift.runs import journal
from tokenswift.runs.records import (
    MOST_OPENING,
    End,
    EndReason,
    Header,
    Identity,
    Record,
    RunState,
    Session,
    Tokens,
    check_same,
    replay,
    sources_of,
)
from tokenswift.runs.regular_files import check_regular, open_regular, write_whole
from tokenswift.types import InputError, Litany, Loop, Step

RECORDS = [
    {"kind": "a", "text": "ein\nzwei — 日本"},
    {"kind": "b", "n": list(range(30))},
    {"kind": "c"},
]

IDENTITY = Identity("float32", "c", "w", None, "none", {"seed": 3}, [2], [], "exact")
HEADER = Header(0.0, "model", None, IDENTITY, [1, 5])
SESSION = Session(0.0, 1, 9, "auto", {}, "report", False, {}, 1, {})


def journal_file(tmp_path: Path) -> tuple[Path, bytes]:
    path = tmp_path / "journal"
    journal.create(path, RECORDS)
    return path, path.read_bytes()


@pytest.mark.parametrize("zeros", [0, 4096])
def test_an_unfinished_record_of_every_length(tmp_path: Path, zeros: int) -> None:
    """However much of the last record is there: the records before it are whole, the rest is cut
    off."""
    path, data = journal_file(tmp_path)
    last = data.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(data), 3):
        path.write_bytes(data[:end] + b"\0" * zeros)
        contents = journal.read(path)
        assert contents.records == RECORDS[:2]
        assert contents.good == last
        assert contents.damaged == 0
    journal.Appender(path, contents).close()
    assert path.read_bytes() == data[:last]


def test_a_flipped_byte_anywhere_is_damage(tmp_path: Path) -> None:
    """Every bit of every record counts, the last record's too; what is good before it is told."""
    path, data = journal_file(tmp_path)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for at in range(ends[0], len(data)):
        for bit in (0, 3, 7) if at % 7 else range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            contents = journal.decode(bytes(broken))
            good = sum(end <= at for end in ends) - 1
            assert contents.records == RECORDS[:good], (at, bit)
            assert contents.good == ends[good], (at, bit)
            assert contents.damaged == len(data) - ends[good], (at, bit)


def test_lost_and_exchanged_records_are_damage(tmp_path: Path) -> None:
    _, data = journal_file(tmp_path)
    lines = data.splitlines(keepends=True)
    for changed in ([0, 2, 3], [0, 2, 1, 3], [0, 1, 1, 2, 3], [0, 1, 3]):
        contents = journal.decode(b"".join(lines[i] for i in changed))
        assert contents.damaged
        assert contents.records == RECORDS[: 1 if changed[1] == 1 else 0]
    for rest in (b"x" * 18, b"00000010 " + b"y" * 26):  # not the beginning of a record
        assert journal.decode(data + rest).damaged == len(rest)


def test_other_versions_and_other_files(tmp_path: Path) -> None:
    path, data = journal_file(tmp_path)
    path.write_bytes(data.replace(b"journal 0.1\n", b"journal 2\n"))
    with pytest.raises(InputError, match=r"journal is of version 2; valid: version 0\.1$"):
        journal.read(path)
    with pytest.raises(
        InputError,
        match=r"^x holds what no run writes \(record 1, [^\n]*'a'[^\n]*\); valid: a run's",
    ):
        journal.decode(data, Record, "x")
    for other in (b"", b"hello", b"tokenswift journal x\n", data[5:]):
        path.write_bytes(other)
        with pytest.raises(InputError, match="is not a journal of tokenswift"):
            journal.read(path)
    with pytest.raises(InputError, match="cannot be read"):
        journal.read(tmp_path / "none")


def test_a_write_that_fails_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    """The disk is full in the middle of a record; later it takes a few bytes at a time."""
    path, _ = journal_file(tmp_path)
    more = journal.Appender(path, journal.read(path))
    more.append({"kind": "d"})
    data = path.read_bytes()
    real = FileIO.write
    room = [20]

    class Full(FileIO):
        def write(self, content: Any) -> int:
            if not room:
                raise OSError(28, "No space left on device")
            return real(self, content[: room.pop()])

    file = more._file
    more._file = Full(os.dup(more._file.fileno()), "wb")
    with pytest.raises(OSError, match="No space left"):
        more.append({"kind": "d", "text": "x" * 100})
    assert path.read_bytes() == data
    room += [7] * 20
    more.append({"kind": "d"})
    assert journal.read(path).records == [*RECORDS, {"kind": "d"}, {"kind": "d"}]
    more.close()
    file.close()


def test_whole_files_are_never_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_but_a_regular_file_of_one_name_is_opened(tmp_path: Path) -> None:
    file, link, pipe, other = (tmp_path / name for name in ("file", "link", "pipe", "other"))
    file.write_bytes(b"old")
    link.symlink_to(file)
    os.mkfifo(pipe)
    os.link(file, other)
    for path, what in ((link, "a link"), (pipe, "no regular file"), (file, "a link")):
        with pytest.raises(
            InputError, match=f"^run_dir {tmp_path} holds '{path.name}', which is {what}; valid: "
        ):
            write_whole(path, b"new")
    with open(other) as opened, pytest.raises(InputError, match="'gone', which is a link;"):
        check_regular(tmp_path / "gone", opened.fileno())


def test_a_new_file_is_no_program(tmp_path: Path) -> None:
    open_regular(tmp_path / "lock", os.O_RDWR | os.O_CREAT).close()
    assert (tmp_path / "lock").stat().st_mode & 0o133 == 0


def tokens(ids: list[int], passes: int = 0, **more: Any) -> Tokens:
    """A record of tokens of one letter each, in one step."""
    n = len(ids)
    sources = sources_of(Step(tuple(ids), 3, 2, 1, 3, sources=("head",) * len(ids)))
    return Tokens(
        ids, sources, [1] * n, "x" * n, [(n, 3, 2, 1, 3, 5)], {"draft": n}, passes, **more
    )


def test_where_the_records_of_a_run_lead_to() -> None:
    loop = Loop(0, 1, 5)
    end = End("eos", "tail")
    records = [tokens([7, 8], 1), replace(SESSION, pid=2), tokens([8, 9, 9], 4, loop=loop)]
    state = replay([HEADER, SESSION, *records])
    assert state == RunState(
        HEADER,
        [SESSION, records[1]],
        [7, 8, 8, 9, 9],
        "hhhhh",
        [1] * 5,
        "xxxxx",
        [(2, 3, 2, 1, 3, 5), (3, 3, 2, 1, 3, 5)],
        {"draft": 3},
        4,
        loop,
    )
    assert (state.session.pid, state.tail, sources_of(Step((1, 2), 0, 0, 0, 0))) == (
        2,
        "",
        "tt",
    )
    state = replay([HEADER, SESSION, *records, tokens([4], 5, end=end)])
    assert (state.loop, state.end, state.tail) == (loop, end, "tail")
    for bad in ([HEADER], [SESSION, HEADER], [HEADER, tokens([1])]):
        with pytest.raises(
            InputError, match="^x does not begin with a run's header; valid: a run's journal$"
        ):
            replay(bad, "x")
    wrong = [
        ("loop: ", tokens([1] * 5, loop=Loop(*one))) for one in ((-1, 1, 2), (1, 1, -1), (1, 1, 5))
    ]
    for reason, record in [("a second header", HEADER), *wrong]:
        with pytest.raises(
            InputError, match=f"^x holds what no run writes .record 4, {reason}.*; valid: a run"
        ):
            replay([HEADER, SESSION, SESSION, record], "x")
    for field, value in {
        "ids": [1],
        "sources": "h",
        "chars": [1, 2],
        "text": "x",
        "steps": [],
    }.items():
        with pytest.raises(
            ValueError, match="^ids, sources, chars, text and steps do not fit each other$"
        ):
            replace(tokens([1, 2]), **{field: value})


def test_the_first_litany_of_a_run_is_kept() -> None:
    """And one that no guard can have seen is refused."""
    for litany in (Litany(0, 0, ""), Litany(1, 1, "i no"), Litany(0, 2, "x" * MOST_OPENING)):
        state = replay([HEADER, SESSION, tokens([7, 8], litany=litany), tokens([9])])
        assert state.litany == litany
        assert replay([HEADER, SESSION, tokens([7, 8], litany=litany)]).litany == litany
    for litany, reason in (
        (Litany(-1, 2, "i no"), "it is not in the text"),
        (Litany(1, -1, "i no"), "it is not in the text"),
        (Litany(1, 2, "i no"), "it is not in the text"),
        (Litany(0, 1, "x" * (MOST_OPENING + 1)), "its opening is no two words"),
        (Litany(0, 1, "i\nno"), "its opening is no two words"),
    ):
        with pytest.raises(InputError) as caught:
            replay([HEADER, SESSION, tokens([7, 8], litany=litany)], "x")
        wrong = f"x holds what no run writes (record 3, litany: {reason})"
        assert str(caught.value) == f"{wrong}; valid: a run's journal"


def test_the_end_mark_is_taken_back_where_the_text_may_not_end_yet() -> None:
    """The newest figures stay, with one token fewer; other ends stay for good."""

    def after(reason: EndReason, min_tokens: int | None) -> RunState:
        ended = tokens([8, 2], 4, end=End(reason, ""))
        longer = replace(SESSION, min_tokens=min_tokens)
        return replay([HEADER, SESSION, tokens([7]), tokens([9] * 3), ended, longer])

    state = after("eos", 6)
    assert state.tokens == [7, 9, 9, 9, 8]
    assert state.sources == "h" * 5
    assert state.chars == [1] * 5
    assert [step[0] for step in state.steps] == [1, 3, 1]
    assert state.steps[-1] == (1, 3, 2, 1, 3, 5)
    assert state.end is None
    others: list[tuple[EndReason, int | None]] = [
        ("eos", 5),
        ("eos", None),
        ("stop", 6),
        ("length", 6),
    ]
    for reason, min_tokens in others:
        state = after(reason, min_tokens)
        assert state.tokens == [7, 9, 9, 9, 8, 2]
        assert state.end == End(reason, "")
    only_the_mark = tokens([2], end=End("eos", ""))
    assert replay([HEADER, SESSION, only_the_mark, SESSION]).tokens == [2]


def test_a_run_of_an_earlier_int8_is_refused() -> None:
    def header(dtype: str, int16_keys: str | None) -> Header:
        identity = replace(IDENTITY, dtype=dtype, int16_keys=int16_keys)
        return replace(HEADER, identity=identity)

    another = "int16_keys are new: the run was written by an earlier version, whose int8 is another"
    for before, now, difference in (
        (header("int8", None), header("int8", "0"), another),
        (header("int8", "1"), header("int8", "0"), "int16_keys is '0', was '1'"),
        (header("float32", None), header("float32", "0"), "int16_keys is '0', was None"),
    ):
        with pytest.raises(InputError) as caught:
            check_same("f", before, now)
        refused = f"run_dir f holds another run: {difference}; valid: "
        assert str(caught.value).startswith(refused)


def test_what_decides_the_tokens_has_to_be_the_same() -> None:
    check_same("run", HEADER, replace(HEADER, made=1.0, name="other"))
    for difference, change, prompt in (
        ("dtype is 'bfloat16', was 'float32'", {"dtype": "bfloat16", "weights": "v"}, [1, 5]),
        (
            "seed is 4, was 3; top_p is 0.5, was 1.0",
            {"sampling": {"seed": 4, "top_p": 0.5}},
            [1, 5],
        ),
        ("eos is [], was [2]; prompt differs; weights differs", {"eos": [], "weights": "v"}, [1]),
        (
            "dtype is 'int8', was 'float32'; xtc_probability is 0.5, was 0.0",
            {"dtype": "int8", "weights": "v", "sampling": {"seed": 3, "xtc_probability": 0.5}},
            [1, 5],
        ),
    ):
        now = replace(HEADER, identity=replace(IDENTITY, **change), prompt=prompt)
        with pytest.raises(InputError) as caught:
            check_same("f", HEADER, now)
        valid = "valid: what the run began with, or another folder"
        assert str(caught.value) == f"run_dir f holds another run: {difference}; {valid}"


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_never_pass(tmp_path: Path, seed: int) -> None:
    """Bytes that are changed, moved, doubled or left out: a beginning of the records, or a line."""
    chance = random.Random(seed)
    _, data = journal_file(tmp_path)
    for _ in range(200):
        start, end = sorted(chance.sample(range(len(data)), 2))
        piece = chance.choice(
            (b"", data[start:end] * 2, chance.randbytes(end - start), data[end:] + data[start:end])
        )
        broken = data[:start] + piece + data[end:]
        try:
            contents = journal.decode(broken)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert contents.records == RECORDS[: len(contents.records)]
            assert broken == data or contents.damaged or len(contents.records) < len(RECORDS)


def test_a_record_nested_without_end_is_a_line() -> None:
    data = b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    length = b"%08x" % len(data)
    line = b"%s %08x %s\n" % (length, zlib.crc32(data, zlib.crc32(length)), data)
    with pytest.raises(InputError, match="holds what no run writes") as caught:
        journal.decode(journal.FIRST + line)
    assert "\n" not in str(caught.value)
