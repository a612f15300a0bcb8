"""Run folders from strangers: nothing outside the folder is read or written, and every fault is one
line."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenswift
from tests.runs.common import CALL, OPTIONS, begin
from tokenswift import LLM, InputError
from tokenswift.cli.main import main
from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.lists import summary_of

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def original(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two sessions, the second one interrupted too."""
    folder = tmp_path_factory.mktemp("original") / "run"
    begin(llm, folder, 12, strategy="tokenswift", strategy_options=OPTIONS)
    begin(llm, folder, 9, stop=(), strategy="tokenswift", strategy_options=OPTIONS)
    return folder


@pytest.fixture
def stranger(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    shutil.copytree(original, tmp_path / "run")
    (tmp_path / "precious").write_text("precious")
    return tmp_path / "run"


def records_of(folder: Path) -> Records:
    records: Any = journal.read(folder / "journal").records
    return records


def rewritten(folder: Path, change: Callable[[Records], object]) -> None:
    """The journal with records that were changed, checksums and all."""
    records = records_of(folder)
    change(records)
    journal.create(folder / "journal", records)


def everything(place: Path) -> dict[str, tuple[int, bytes]]:
    """Kind and content of all that is below a folder."""
    contents = {}
    for path in sorted(place.rglob("*")):
        mode = path.lstat().st_mode
        data = os.readlink(path).encode() if stat.S_ISLNK(mode) else b""
        contents[str(path.relative_to(place))] = (
            mode,
            path.read_bytes() if stat.S_ISREG(mode) else data,
        )
    return contents


def uses(folder: Path, llm: LLM) -> list[Callable[[], object]]:
    """Everything that takes a run's folder."""
    return [
        lambda: tokenswift.resume(folder, llm=llm),
        lambda: llm.generate("hello", **CALL, run_dir=folder),
        lambda: folders.load(folder),
    ]


# ---- links and other things ----------------------------------------------------------------------


def link(path: Path, target: Path) -> str:
    path.symlink_to(target)
    return "a link"


def pipe(path: Path, target: Path) -> str:
    os.mkfifo(path)
    return "no regular file"


@pytest.mark.parametrize("name", ["lock", "journal", "text.txt"])
@pytest.mark.parametrize("put", [link, pipe])
def test_what_is_no_regular_file_is_refused(
    llm: LLM, stranger: Path, name: str, put: Callable[[Path, Path], str]
) -> None:
    """Nothing is followed, opened, made or emptied, and nothing hangs."""
    (stranger / name).unlink(missing_ok=True)
    target = stranger.parent / "precious"
    if name == "journal":
        shutil.copy(stranger.parent / "run" / "lock", target)
    what = put(stranger / name, target)
    before = everything(stranger.parent)
    for use in uses(stranger, llm)[
        : 3 if name == "journal" else 2
    ]:  # what reads a journal reads no other
        with pytest.raises(
            InputError, match=f"run_dir .*run holds '{name}', which is {what}; valid: "
        ):
            use()
    if name == "journal":
        for argv in (["resume"], ["runs", "--text"], ["runs"]):
            assert main([argv[0], str(stranger), *argv[1:]]) == (0 if argv == ["runs"] else 2)
        assert f"unreadable: run_dir {stranger} holds" in summary_of(stranger)["state"]
    assert everything(stranger.parent) == before


def test_a_folder_that_holds_other_files_is_not_filled(
    llm: LLM, tmp_path: Path, capsys: Any
) -> None:
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter 1.tex").write_text("mine")
    before = everything(tmp_path)
    line = (
        "run_dir is '.*thesis': it holds 'chapter 1.tex' and no run; valid: a new or an empty "
        "folder"
    )
    with pytest.raises(InputError, match=line):
        llm.generate("hello", **CALL, run_dir=place)
    assert main(["generate", "hello", "--run-dir", str(place)]) == 2
    assert "error: --run-dir is '" in capsys.readouterr().err
    assert everything(tmp_path) == before
    (place / "chapter 1.tex").unlink()
    (place / "journal.17ab34cd.part").write_text(
        "of a process that died before there was a journal"
    )
    (place / "lock").write_text("17\n")
    assert llm.generate("hello", **CALL, run_dir=place).finish_reason == "length"


# ---- what a journal says -------------------------------------------------------------------------


def put(place: str, value: Any) -> Callable[[Records], object]:
    """A change of one field: ``2.ids.0`` is the first token of the third record."""

    def change(records: Records) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in place.split(".")]
        inside: Any = records
        for step in way:
            inside = inside[step]
        inside[last] = value

    return change


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        ("0.prompt.0", -1, r"record 1, Expected `int` >= 0 - at `\$.prompt"),
        ("0.name", "\x1b[2J", "record 1, Expected `str` matching"),
        ("0.identity.sampling.top_p", 7, "record 1, top_p is 7; valid: in .0, 1."),
        ("0.identity.more", 1, "record 1, Object contains unknown field `more`"),
        ("1.strategy", "none", "record 2, strategy is 'none'; valid: "),
        ("1.options", {"tree": {"a": 1}}, "record 2, Expected .*got `object`"),
        ("2.ids", [1], "record 3, ids, sources, chars, text and steps do not fit"),
        ("2.steps.0", [1, 2], "record 3, Expected `array` of length 6"),
        ("2.loop", {"start": 5, "size": 1, "span": 10**6}, "record 3, loop: it is not in"),
        ("2.kind", "none", "record 3, Invalid value 'none'"),
    ],
)
def test_fields_are_checked(llm: LLM, stranger: Path, place: str, value: Any, line: str) -> None:
    """By type and range, in one line, before anything is loaded or written."""
    rewritten(stranger, put(place, value))
    before = everything(stranger.parent)
    for use in uses(stranger, llm):
        with pytest.raises(
            InputError, match=f"journal holds what no run writes .{line}.*; valid: a run's"
        ) as e:
            use()
        assert str(e.value).isprintable()
    if any(path.name == "lock" for path in stranger.iterdir()):
        before["run/lock"] = everything(stranger.parent)["run/lock"]
    assert everything(stranger.parent) == before


def test_settings_that_are_left_out(stranger: Path) -> None:
    """They are as usual, in lists as well."""
    rewritten(stranger, put("0.identity.sampling", {}))
    assert main(["runs", str(stranger)]) == 0
    assert summary_of(stranger).get("seed") == 0


def test_what_is_loaded_is_told_first(stranger: Path, capsys: Any) -> None:
    """Heads and draft model, too: a journal's names may be of anything."""
    loading = dict(
        dtype="auto", device="cpu", rope_scaling=None, weights="stored", kv_cache_dtype="auto"
    )
    loading |= {"model": "no/such/model", "heads": "a/heads", "backend": "auto", "eagle": "auto"}
    rewritten(stranger, put("0.model", loading))
    rewritten(stranger, put("3.options", {"draft_model": "a/draft"}))
    assert main(["resume", str(stranger)]) == 2
    assert capsys.readouterr().err.startswith("loading no/such/model, a/heads, a/draft\n")


def test_ids_outside_the_vocabulary(llm: LLM, stranger: Path) -> None:
    for at in (260, 2**31 - 1):
        rewritten(stranger, put("2.ids.0", at))
        with pytest.raises(InputError, match=f"token id is {at}; valid: 0 to 259"):
            tokenswift.resume(stranger, llm=llm)


# ---- the whole text ------------------------------------------------------------------------------


def test_the_text_command(llm: LLM, tmp_path: Path, capsys: Any) -> None:
    """The text so far, and the whole text."""
    folder = tmp_path / "run"
    complete = llm.generate("hello", **CALL).text
    begin(llm, folder, 30, strategy="autoregressive")
    assert main(["runs", str(folder), "--text"]) == 0
    so_far = capsys.readouterr().out
    assert so_far
    assert complete.startswith(so_far)
    assert so_far != complete
    tokenswift.resume(folder, llm=llm)
    assert main(["runs", str(folder), "--text", "-", "--quiet"]) == 0
    assert capsys.readouterr() == (complete, "")
    assert main(["runs", str(folder), "--text", str(tmp_path / "all.txt")]) == 0
    assert (tmp_path / "all.txt").read_bytes().decode() == complete
    assert main(["runs", str(folder), "--text", "/dev/full"]) == 1
