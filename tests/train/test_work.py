"""The work folder of a training: bad data leave nothing, a disk too small is told before, files
that are cut short are written anew, and two trainings are kept apart."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from tests.conftest import tiny_model
from tests.train.test_resume import Killed
from tests.train.test_train import full_run, small, words
from tokenswift.train import work
from tokenswift.train.store import HiddenStore
from tokenswift.train.work import working_in
from tokenswift.types import InputError, RunError

START = small(steps=0, epochs=0)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "t.txt").write_text(words(800))
    return tmp_path / "t.txt"


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "gives 0 tokens to learn from"),
        (words(60).encode()[:70], "gives .* tokens to learn from, .* at least 256"),
        (b"caf\xe9 " * 400, "is not UTF-8; valid: UTF-8 text"),
    ],
)
def test_bad_data_leave_no_work_folder(data: bytes, line: str, text: Path, tmp_path: Path) -> None:
    """And the corrected command has the same folder."""
    bad = tmp_path / "bad.txt"
    bad.write_bytes(data)
    with pytest.raises(InputError, match=line):
        full_run(tiny_model(), str(bad), tmp_path, START)
    assert not (tmp_path / "work").exists()
    full_run(tiny_model(), str(text), tmp_path, START)
    assert (tmp_path / "h.safetensors").exists()


def test_no_text_long_enough_leaves_no_work_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tokenswift.train.loop.Windows.__len__", lambda self: 0)
        patch.setattr("tokenswift.train.heads.start", lambda *_: None)
        with pytest.raises(InputError, match="no text long enough to learn from"):
            full_run(tiny_model(), str(text), tmp_path, START)
    assert not (tmp_path / "work").exists()


def test_a_folder_in_which_no_text_was_written_is_nobodys(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that was killed before its first text leaves its folder to any other."""

    def append(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(HiddenStore, "append", append)
        with pytest.raises(Killed):
            full_run(tiny_model(), str(text), tmp_path, START)
    assert (tmp_path / "work/states/made_from").exists()
    full_run(tiny_model(), str(text), tmp_path, START, tokens=600)


def test_a_training_of_other_options_says_what_to_remove(text: Path, tmp_path: Path) -> None:
    full_run(tiny_model(), str(text), tmp_path, START)
    line = "other data or options; .* or remove training, start.safetensors, checkpoint.pt there"
    with pytest.raises(InputError, match=line):
        full_run(tiny_model(), str(text), tmp_path, small(steps=0, epochs=0, lr=0.1))
    for name in ("training", "start.safetensors"):
        (tmp_path / "work" / name).unlink()
    full_run(tiny_model(), str(text), tmp_path, small(steps=0, epochs=0, lr=0.1))


def test_a_disk_without_room_is_told_before_anything_is_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1000
    monkeypatch.setattr(work.shutil, "disk_usage", lambda path: Usage(10**9, 0, free))
    line = rf"work folder {tmp_path}/work needs ([\d,]+) bytes .* its disk has 1,000 free; valid: "
    with pytest.raises(InputError, match=line) as caught:
        full_run(tiny_model(), str(text), tmp_path, START)
    assert not (tmp_path / "work").exists()
    needed = int(str(caught.value).split(" needs ")[1].split(" ")[0].replace(",", ""))
    free = needed
    full_run(tiny_model(), str(text), tmp_path, START)
    written = sum(map(len, files(tmp_path / "work").values()))
    assert needed / 3 < written < needed


@pytest.mark.parametrize("size", [0, 7, 500, -1])
def test_states_that_are_cut_short_are_written_anew(
    size: int, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a store that was complete, too; all bytes are what they were."""
    full_run(tiny_model(), str(text), tmp_path, START)
    folder = tmp_path / "work" / "states"
    before = files(folder)
    path = folder / sorted(before)[1]
    path.write_bytes(path.read_bytes()[:size])
    full_run(tiny_model(), str(text), tmp_path, START)
    assert f"{path} is damaged; its text is written anew" in caplog.text
    assert files(folder) == before


def test_a_start_that_is_cut_short_is_made_anew(text: Path, tmp_path: Path) -> None:
    full_run(tiny_model(), str(text), tmp_path, START)
    path = tmp_path / "work" / "start.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:100])
    full_run(tiny_model(), str(text), tmp_path, START)
    assert path.read_bytes() == before


def test_a_checkpoint_that_is_cut_short_is_told_in_a_line(text: Path, tmp_path: Path) -> None:
    full_run(tiny_model(), str(text), tmp_path, small(steps=2))
    path = tmp_path / "work" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match="checkpoint.pt is damaged .*; without it the same command"):
        full_run(tiny_model(), str(text), tmp_path, small(steps=2))
    path.unlink()
    full_run(tiny_model(), str(text), tmp_path, small(steps=2))


def test_two_trainings_in_one_folder_are_kept_apart(text: Path, tmp_path: Path) -> None:
    line = f"work folder {tmp_path}/work is in use by another training; valid: another --work"
    with working_in(tmp_path / "work"):
        with pytest.raises(InputError, match=line):
            full_run(tiny_model(), str(text), tmp_path, START)
        assert [path.name for path in (tmp_path / "work").iterdir()] == ["lock"]
    full_run(tiny_model(), str(text), tmp_path, START)
