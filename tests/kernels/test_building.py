"""How the CPU kernels are compiled and kept: by parts, once, and in a folder of the user alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenswift.kernels.cpu import compilers, library
from tokenswift.kernels.formats import FORMATS
from tokenswift.models import target as targets

LITTLE = "int one(void) { return 1; }\n"  # these libraries are never called


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a source that takes a moment to compile."""
    monkeypatch.setattr(library, "SOURCES", ("cpu.c",))
    monkeypatch.setattr(library, "_sources", lambda: [LITTLE])
    if isinstance(library.compiled(tmp_path), str):
        pytest.skip("no C compiler here")
    return next(tmp_path.glob("*.so"))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no library": lambda data: b"no library",
    "empty": lambda data: b"",
    "cut": lambda data: data[:1000],
    "cut in half": lambda data: data[: len(data) // 2],
    "a changed byte": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "without its digest": lambda data: data[: -library.DIGEST_BYTES],
}


def test_every_number_format_is_a_part_of_its_own() -> None:
    formats = {f"-DTS_FORMAT={name.upper()}" for name in FORMATS}
    first, *others = library._parts()
    assert first == ["-DTS_PARTS", "cpu.c"]
    assert {part[1] for part in others} == formats


def test_progress_is_told_part_by_part(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    commands = [["true"]] * 3
    assert compilers.run_all(commands, tmp_path, 2, lambda *step: told.append(step)) is None
    assert told == [("compile", done, 3) for done in sorted({done for _, done, _ in told})]
    assert [told[0][1], told[-1][1]] == [0, 3]


def test_a_part_that_fails_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    failing = ["sh", "-c", "echo 'x.c:3: error: no such thing' >&2; exit 1"]
    reason = compilers.run_all([["sleep", "60"], failing, ["sleep", "60"]], tmp_path, processors=2)
    assert reason == "x.c:3: error: no such thing"
    assert time.monotonic() - began < 30


def test_compilers_have_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "TIMEOUT", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        compilers.run_all([["sleep", "60"]], tmp_path, processors=2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_made_again(compiled: Path, tmp_path: Path, damage: str) -> None:
    """Loading one that is cut would end the process."""
    data = compiled.read_bytes()
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    path = other / compiled.name
    path.write_bytes(DAMAGES[damage](data))
    assert not isinstance(library.compiled(other), str)
    assert len(path.read_bytes()) == len(data)
    assert [file.name for file in other.iterdir()] == [compiled.name]


def test_a_library_is_compiled_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert not isinstance(library.compiled(compiled.parent), str)


def test_another_processor_has_a_library_of_its_own(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "processor", lambda: "another one")
    assert not isinstance(library.compiled(compiled.parent), str)
    assert len(list(compiled.parent.glob("*.so"))) == 2


def test_two_processes_may_compile_at_once(compiled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    code = f"""
import sys
from pathlib import Path
from tokenswift.kernels.cpu import library
library.SOURCES = ("cpu.c",)
library._sources = lambda: [{LITTLE!r}]
sys.exit(isinstance(library.compiled(Path(sys.argv[1])), str))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(folder)]
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert [file.name for file in folder.iterdir()] == [compiled.name]


def test_libraries_in_a_folder_of_another_user_are_not_loaded(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    user = os.getuid()
    monkeypatch.setattr(library.os, "getuid", lambda: user + 1)
    opened = library.compiled(compiled.parent)
    assert not isinstance(opened, str)
    assert opened._name != str(compiled)
    (record,) = caplog.records
    assert "others may change what is in" in record.message


def test_libraries_in_a_folder_that_others_may_write_are_not_loaded(
    compiled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mode in (0o770, 0o707):
        compiled.parent.chmod(mode)
        caplog.clear()
        fresh = library.compiled(compiled.parent)
        assert not isinstance(fresh, str)
        assert fresh._name != str(compiled)
        (message,) = caplog.messages
        assert "others may change what is in" in message


def test_without_a_working_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: "/bin/false")
    assert library.compiled(tmp_path) == "/bin/false ended with an error"
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setattr(targets, "cache_dir", lambda: tmp_path)
    assert targets.backend_for().name == "torch"
    assert [record.message for record in caplog.records] == [
        "CPU kernels are not available (there is no C compiler (cc, gcc or clang)); "
        "the slower torch path is used"
    ]


def test_a_folder_that_cannot_be_written_is_done_without(compiled: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert not isinstance(library.compiled(blocked / "kernels"), str)
