"""Run folders from strangers: nothing outside the folder is read or written, and every fault is one line."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenswift
from tests.conftest import tiny_model, tiny_tokenizer
from tests.runs.common import CALL, begin, texts
from tokenswift import LLM, InputError
from tokenswift.cli.main import main
from tokenswift.engine.resume import request_of
from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.listing import summary_of
from tokenswift.runs.report.page import page

Records = list[dict[str, Any]]
OPTIONS = {"tree": (2, 2), "ngrams": 2, "ngram_count": 1, "budget": 24, "sinks": 2, "draft": "partial"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model(), tiny_tokenizer())


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
    return journal.read(folder / "journal").records


def rewritten(folder: Path, change: Callable[[Records], object]) -> None:
    """The journal with records that were changed, checksums and all."""
    records = records_of(folder)
    change(records)
    journal.create(folder / "journal", records)


def everything(place: Path) -> dict[str, tuple[int, bytes]]:
    """Kind and content of all that is below a folder."""
    found = {}
    for path in sorted(place.rglob("*")):
        mode = path.lstat().st_mode
        data = os.readlink(path).encode() if stat.S_ISLNK(mode) else b""
        found[str(path.relative_to(place))] = (mode, path.read_bytes() if stat.S_ISREG(mode) else data)
    return found


def uses(folder: Path, llm: LLM) -> list[Callable[[], object]]:
    """Everything that takes a run's folder."""
    return [
        lambda: tokenswift.resume(folder, llm=llm),
        lambda: llm.generate("hello", **CALL, run_dir=folder),
        lambda: folders.load(folder),
    ]


# ---- links and other things ------------------------------------------------------------------------------


def link(path: Path, target: Path) -> str:
    path.symlink_to(target)
    return "a link"


def dangling(path: Path, target: Path) -> str:
    path.symlink_to(target.parent / "new")
    return "a link"


def pipe(path: Path, target: Path) -> str:
    os.mkfifo(path)
    return "a pipe"


def hard_link(path: Path, target: Path) -> str:
    path.hardlink_to(target)
    return "one file with another"


def directory(path: Path, target: Path) -> str:
    path.mkdir()
    return "a folder"


@pytest.mark.parametrize(
    "name", ["lock", "journal", "text.unfinished.txt", "text.txt", "text.2.txt", "report.html"]
)
@pytest.mark.parametrize("put", [link, dangling, pipe])
def test_what_is_no_regular_file_is_refused(
    llm: LLM, stranger: Path, name: str, put: Callable[[Path, Path], str]
) -> None:
    """Whatever its name: nothing is followed, opened, made or emptied, and nothing hangs."""
    (stranger / name).unlink(missing_ok=True)
    target = stranger.parent / "precious"
    if name == "journal":
        shutil.copy(stranger.parent / "run" / "lock", target)
    what = put(stranger / name, target)
    before = everything(stranger.parent)
    for use in uses(stranger, llm):
        with pytest.raises(InputError, match=f"run_dir .*run holds '{name}', which is {what}; valid: "):
            use()
    for argv in (["resume"], ["report"], ["text"], ["runs"]):
        assert main([*argv, str(stranger)]) == (0 if argv == ["runs"] else 2)
    assert f"unreadable: run_dir {stranger} holds" in summary_of(stranger)["state"] or name != "journal"
    assert everything(stranger.parent) == before


@pytest.mark.parametrize("name", ["lock", "journal"])
@pytest.mark.parametrize("put", [hard_link, directory])
def test_files_that_are_written_in_place_have_one_name(
    llm: LLM, stranger: Path, name: str, put: Callable[[Path, Path], str]
) -> None:
    target = stranger.parent / "precious"
    shutil.copy(stranger / name, target)  # of the right kind, and still somebody else's
    (stranger / name).unlink()
    what = put(stranger / name, target)
    before = everything(stranger.parent)
    for use in uses(stranger, llm)[:2]:
        with pytest.raises(InputError, match=f"holds '{name}', which is {what}"):
            use()
    after = everything(stranger.parent)
    assert {k: v for k, v in after.items() if k != "run/lock"} == {
        k: v for k, v in before.items() if k != "run/lock"
    }
    assert after["precious"] == before["precious"]


def test_a_link_that_is_put_there_meanwhile(
    llm: LLM, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the folder and the opening: still nothing is followed."""
    target = stranger.parent / "precious"
    for name in ("lock", "text.unfinished.txt"):
        real = folders.check_entries

        def then(folder: Path, name: str = name, real: Any = real) -> list[str]:
            names = real(folder)
            (stranger / name).unlink(missing_ok=True)
            (stranger / name).symlink_to(target)
            return names

        with monkeypatch.context() as patch:
            patch.setattr(folders, "check_entries", then)
            with pytest.raises(InputError, match=f"holds '{name}', which is a link"):
                tokenswift.resume(stranger, llm=llm)
        assert target.read_text() == "precious"
        (stranger / name).unlink()


def test_a_lock_of_another_kind_stays(llm: LLM, stranger: Path) -> None:
    (stranger / "lock").write_text("mine")
    with pytest.raises(InputError, match="holds a file lock of another kind"):
        tokenswift.resume(stranger, llm=llm)
    assert (stranger / "lock").read_text() == "mine"


def test_parts_left_by_somebody_are_not_followed(llm: LLM, stranger: Path) -> None:
    """The name of a file in the making can be foreseen."""
    part = stranger / f"text.unfinished.txt.{os.getpid()}.part"
    part.write_text("left by a process that died")
    assert tokenswift.resume(stranger, llm=llm).finish_reason == "length" and not part.exists()


def test_a_folder_that_holds_other_files_is_not_filled(llm: LLM, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter 1.tex").write_text("mine")
    before = everything(tmp_path)
    line = "run_dir is '.*thesis': it holds 'chapter 1.tex' and no run; valid: a new or an empty folder"
    with pytest.raises(InputError, match=line):
        llm.generate("hello", **CALL, run_dir=place)
    assert main(["generate", "hello", "--run-dir", str(place)]) == 2
    assert "error: --run-dir is '" in capsys.readouterr().err and everything(tmp_path) == before
    (place / "chapter 1.tex").unlink()
    (place / "journal.17.part").write_text("of a process that died before there was a journal")
    (place / "lock").write_text("17\n")
    assert llm.generate("hello", **CALL, run_dir=place).finish_reason == "length"


# ---- what a journal says ---------------------------------------------------------------------------------


def test_nothing_is_explained_into_a_file_that_a_journal_names(
    stranger: Path, tiny_folder: Callable[..., Path]
) -> None:
    """Not a stranger's, and not one's own: what was explained before stays."""
    place = stranger.parent
    call: dict[str, Any] = {**CALL, "strategy": "auto"}
    with LLM(tiny_folder()) as llm:
        begin(llm, place / "own", 20, strategy_options={"explain": str(place / "why")}, strategy="auto")
        why = (place / "why").read_text()
        assert why and "explain" not in records_of(place / "own")[1]["options"]
        rewritten(place / "own", lambda r: r[1]["options"].update(explain=str(place / "precious")))
        found = tokenswift.resume(place / "own", llm=llm)
        assert found.token_ids == llm.generate("hello", **call).token_ids
    assert (place / "why").read_text() == why and (place / "precious").read_text() == "precious"


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
        ("0.prompt.0", -1, "record 1, prompt.0.: Expected `int` >= 0"),
        ("0.prompt", [], "record 1, prompt: Expected `array` of length >= 1"),
        ("0.made", 1e300, "record 1, made: Expected `float` <"),
        ("0.name", "\x1b[2J", "record 1, name: Expected `str` matching"),
        ("0.identity.sampling.top_p", 7, "record 1, identity: top_p is 7; valid: in .0, 1."),
        ("0.identity.sampling.top_q", 7, "record 1, identity: 'top_q' is not a field of SamplingParams"),
        (
            "0.identity.sampling",
            {"top_k": 3, "seed": 1},
            "record 1, identity: sampling lacks eta_cutoff, greedy",
        ),
        ("0.identity.eos", ["a"], "record 1, identity.eos.0.: Expected `int`, got `str`"),
        ("0.identity.stop", [""], "record 1, identity.stop.0.: Expected `str` of length >= 1"),
        ("0.identity.more", 1, "record 1, identity: Object contains unknown field `more`"),
        ("0.model", {"model": "/etc"}, "record 1, model: Object missing required field"),
        ("1.number", "../..", "record 2, number: Expected `int`, got `str`"),
        ("1.number", 0, "record 2, number: Expected `int` >= 1"),
        ("1.number", True, "record 2, number: Expected `int`, got `bool`"),
        ("1.start", 1, "record 2, start: 1 of 0 characters"),
        ("1.max_new_tokens", 0, "record 2, max_new_tokens: Expected `int` >= 1"),
        ("1.strategy", "none", "record 2, strategy is 'none'; valid: "),
        ("1.numerics", {}, "record 2, numerics lacks equal_bits"),
        ("1.numerics.equal_bits", "yes", "record 2, numerics lacks equal_bits"),
        ("1.loop.min_count", 1, "record 2, min_count is 1; valid: an integer of at least 2"),
        ("1.options", {"tree": {"a": 1}}, "record 2, options.*Expected .*got `object`"),
        ("1.on_loop", "x", "record 2, on_loop: Invalid enum value"),
        ("2.ids.0", -5, "record 3, ids.0.: Expected `int` >= 0"),
        ("2.ids.0", 2**31, "record 3, ids.0.: Expected `int` <="),
        ("2.ids.0", 1.5, "record 3, ids.0.: Expected `int`, got `float`"),
        ("2.ids", [1], "record 3, ids, sources, chars, text and steps do not fit"),
        ("2.text", "x", "record 3, ids, sources, chars, text and steps do not fit"),
        ("2.sources", "x", "record 3, sources: Expected `str` matching"),
        ("2.chars.0", -1, "record 3, chars.0.: Expected `int` >= 0"),
        ("2.steps.0", [1, 2], "record 3, steps.0.: Expected `array` of length 6, got 2"),
        ("2.steps.0.0", 0, "record 3, steps.0..0.: Expected `int` >= 1"),
        ("2.seconds.draft", -1.0, "record 3, seconds.*Expected `float` >= 0"),
        ("2.passes", None, "record 3, passes: Expected `int`, got `null`"),
        ("2.stream", {}, "record 3, stream: Object missing required field `window`"),
        ("2.stream.window", [1, 2, 3], "record 3, stream.window: not the newest tokens"),
        ("2.stream.stopped", "no", "record 3, stream.stopped: Expected `bool`"),
        ("2.loop", {"start": 5, "size": 1, "span": 10**6, "sign": "pattern"}, "record 3, loop: ends behind"),
        ("2.kind", "header", "record 3, kind: Invalid value 'header'"),
        ("2.kind", "\x1b[31m", r"record 3, kind: Invalid value '\\x1b\[31m'"),
        ("2.\ud800", 1, "record 3, .*surrogates not allowed"),
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


def test_ids_outside_the_vocabulary(llm: LLM, stranger: Path) -> None:
    for at in (260, 2**31 - 1):
        rewritten(stranger, put("2.ids.0", at))
        with pytest.raises(InputError, match=f"run holds the token id {at}; valid: ids .*, 0 to 259$"):
            tokenswift.resume(stranger, llm=llm)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"budget": -1}, "budget is -1; valid: "),
        ({"foo": 1, "tree": [2]}, "'foo' is not an option of strategy tokenswift"),
        ({"draft_model": 3}, "draft_model is 3; valid: a name"),
        ({"tree": ["x"]}, "tree is .*; valid: integers"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(
    stranger: Path, options: dict[str, Any], line: str, capsys: Any
) -> None:
    rewritten(stranger, lambda records: [r.update(options=options) for r in records if "options" in r])
    with pytest.raises(InputError, match=line):
        tokenswift.resume(stranger)
    assert main(["resume", str(stranger)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_a_record_nested_without_end_is_damage(stranger: Path) -> None:
    data = b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    import zlib

    length = b"%08x" % len(data)
    line = b"%s %08x %s\n" % (length, zlib.crc32(data, zlib.crc32(length)), data)
    contents = journal.decode(journal.FIRST + line)
    assert contents.records == [] and contents.damaged


# ---- anything at all -------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-5, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["../..", "/etc/passwd", "\x1b[2J", "t", "header", "pattern", "\ud800", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
QUICK = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
WHOLE = settings(QUICK, max_examples=300)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of records, however deep (of long lists the first and last)."""
    if way:
        yield way
    inside = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inside = (
            [(i, v) for i, v in enumerate(value) if i in (0, len(value) - 1)] if way else enumerate(value)
        )
    for key, part in inside:
        yield from places(part, (*way, key))


def attacked(folder: Path, llm: LLM) -> None:
    """Use a folder in every way: one-line errors alone, and nothing outside it changes."""
    outside = everything(folder.parent / "outside")
    try:
        summary_of(folder)
        _, state = folders.load(folder)
        page(state, "run")
        request_of(state, folder)
        tokenswift.resume(folder, max_new_tokens=len(state.tokens) + 3, llm=llm, drop_damaged=True)
    except InputError as error:
        assert "\n" not in str(error)
    assert everything(folder.parent / "outside") == outside and set(os.listdir(folder.parent)) <= {
        "outside",
        "run",
    }


@pytest.fixture
def arena(original: Path, tmp_path: Path) -> Callable[[Records | bytes], Path]:
    """Makes a run's folder of records, beside files that must not change."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")

    def make(content: Records | bytes) -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(original, tmp_path / "run")
        path = tmp_path / "run" / "journal"
        path.write_bytes(content) if isinstance(content, bytes) else journal.create(path, content)
        return tmp_path / "run"

    return make


def any_value_in_any_field(data: st.DataObject, llm: LLM, original: Path, arena: Any) -> None:
    records = copy.deepcopy(records_of(original))
    for _ in range(data.draw(st.integers(1, 2))):
        *way, last = data.draw(st.sampled_from(list(places(records))))
        inside: Any = records
        for step in way:
            inside = inside[step]
        how = data.draw(st.sampled_from(["value", "lost", "more"]))
        if how == "lost":
            del inside[last]
        elif how == "more" and isinstance(inside, dict):
            inside[data.draw(st.text(max_size=4))] = data.draw(VALUES)
        elif way:
            inside[last] = data.draw(VALUES)
        if not records:
            return
    attacked(arena(records), llm)


def any_bytes(data: st.DataObject, llm: LLM, original: Path, arena: Any) -> None:
    """Cut, overwritten, or nothing of a journal from the start."""
    raw = (original / "journal").read_bytes()
    begin, end = sorted(data.draw(st.lists(st.integers(0, len(raw)), min_size=2, max_size=2)))
    new = data.draw(st.binary(max_size=40))
    how = data.draw(st.sampled_from(["inside", "cut", "alone", "behind"]))
    made = {"inside": raw[:begin] + new + raw[end:], "cut": raw[:end], "alone": new, "behind": raw + new}
    attacked(arena(made[how]), llm)


ATTACKS = pytest.mark.parametrize("attack", [any_value_in_any_field, any_bytes])


@ATTACKS
@QUICK
@given(data=st.data())
def test_some_attacks(attack: Any, data: st.DataObject, llm: LLM, original: Path, arena: Any) -> None:
    attack(data, llm, original, arena)


@pytest.mark.slow
@ATTACKS
@WHOLE
@given(data=st.data())
def test_many_attacks(attack: Any, data: st.DataObject, llm: LLM, original: Path, arena: Any) -> None:
    attack(data, llm, original, arena)


# ---- the whole text --------------------------------------------------------------------------------------


def test_the_whole_text_of_a_run_in_pieces(
    llm: LLM, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Edited between kill and resume: the folder holds it in two pieces, the journal has it all."""
    folder, whole = tmp_path / "run", llm.generate("hello", **CALL).text
    begin(llm, folder, 30, strategy="autoregressive")
    (folder / "text.unfinished.txt").write_text("mine", encoding="utf-8")
    assert main(["text", str(folder)]) == 0
    so_far = capsys.readouterr().out
    assert so_far and whole.startswith(so_far) and so_far != whole
    tokenswift.resume(folder, llm=llm)
    assert f"the whole text is written by: tokenswift text {folder}" in caplog.text
    before = texts(folder)
    assert set(before) == {"text.unfinished.txt", "text.2.txt"} and whole not in before.values()
    assert main(["text", str(folder)]) == 0
    assert capsys.readouterr() == (whole, "")
    assert main(["text", str(folder), "--output", str(tmp_path / "all.txt")]) == 0
    assert (tmp_path / "all.txt").read_bytes().decode() == whole
    assert f"{tmp_path / 'all.txt'}, 90 tokens" in capsys.readouterr().err
    assert main(["text", str(folder), "--output", "-", "--quiet"]) == 0
    assert capsys.readouterr() == (whole, "")
    for name in ("text.2.txt", "text.unfinished.txt", "journal"):
        assert main(["text", str(folder), "--output", str(folder / name)]) == 2
        assert f"is the file of the run's {name}" in capsys.readouterr().err
    assert texts(folder) == before
    assert main(["text", str(tmp_path)]) == 2 and "holds no run" in capsys.readouterr().err
    assert main(["text", str(folder), "--output", "/dev/full"]) == 1


def test_the_text_before_damage(llm: LLM, stranger: Path, capsys: Any) -> None:
    data = bytearray((stranger / "journal").read_bytes())
    data[-9] ^= 1
    (stranger / "journal").write_bytes(data)
    assert main(["text", str(stranger)]) == 0
    shown = capsys.readouterr()
    assert "the journal is damaged at byte" in shown.err and shown.out
    assert json.dumps(shown.out)
