"""Kernels that come with the package: which instruction set is taken, and that no other library ever is."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import kernels as wheels
from tests.tiny import tiny_model
from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend, fault_of
from tokenswift.models import target as targets

AVX2 = "sse2 avx avx2 fma f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
#: what processors report, and the set that is taken
REPORTS = [
    ("x86_64", "", "x86-64"),
    ("x86_64", "sse2 avx", "x86-64"),
    ("AMD64", AVX2, "avx2"),
    ("x86_64", f"{AVX2} avx_vnni", "avx2-vnni"),
    ("x86_64", f"{AVX2} avx512f avx512cd", "avx2"),  # Xeon Phi
    ("x86_64", AVX512, "avx512"),
    ("x86_64", f"{AVX512} avx512_bf16", "avx512"),
    ("x86_64", f"{AVX512} avx512_vnni", "avx512-vnni"),
    ("x86_64", f"{AVX512} avx512_vnni avx512_bf16 avx_vnni", "avx512-bf16"),
    ("aarch64", "fp asimd", "neon"),
    ("aarch64", "fp asimd asimddp", "neon-dotprod"),
    ("arm64", "asimddp i8mm", "neon-i8mm"),
    ("arm64", "asimddp i8mm bf16", "neon-bf16"),
    ("arm64", "i8mm bf16", "neon"),
    ("riscv64", "asimddp avx2", None),
]


@pytest.mark.parametrize(("machine", "report", "taken"), REPORTS)
def test_the_best_set_of_the_processor_is_taken(
    monkeypatch: pytest.MonkeyPatch, machine: str, report: str, taken: str | None
) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    every = [name for sets in library.SETS.values() for name in sets]
    assert library.choice("auto", report, every) == taken
    # a set by name, where the processor has it; the next best where the library lacks one
    assert [name for name in every if library.choice(name, report, every)] == library.fitting(report)
    rest = [name for name in every if name != taken]
    assert library.choice("auto", report, rest) == ([None, *library.fitting(report)][-2:-1] or [None])[0]


LITTLE = "const char ts_build[] = TS_BUILD;\nint ts_answer(void) { return 42; }\n"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the kernels' sources a short one."""
    here = tmp_path / "kernels" / "cpu"
    here.mkdir(parents=True)
    (here / "cpu.c").write_text(LITTLE)
    (tmp_path / "version.py").write_text('__version__ = "1.0"\n')
    monkeypatch.setattr(library, "HERE", here)
    monkeypatch.setattr(library, "SOURCES", ("cpu.c",))
    return here


@pytest.fixture
def built(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a library with two sets, which the package is taken to carry."""
    own = [name for name, each in wheels.PLATFORMS.items() if each.architecture == library.architecture()]
    if shutil.which("cc") is None or not own:
        pytest.skip("no C compiler, or another kind of processor")
    folder = sources / "built"
    wheels.make(own[0], folder, ["cc"], sets=list(library.own_sets())[:2])
    monkeypatch.setattr(library, "BUILT", folder)
    monkeypatch.delenv("TOKENSWIFT_KERNELS", raising=False)
    return folder


def test_each_set_has_its_entries(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, each in list(library.own_sets().items())[:2]:
        monkeypatch.setattr(library, "processor", lambda needs=each.needs: f"a processor {needs}")
        carried = library.carried("auto")
        assert carried is not None and carried.instructions == name
        assert carried.ts_answer() == 42 and carried.ts_answer is carried.ts_answer
        assert each.flags[0] in library.text_of(carried, "ts_build")
        assert library.describe() == f"{name} (built in, the best of this processor)"
        found.append(carried.key)
    assert len(set(found)) == 2
    monkeypatch.setenv("TOKENSWIFT_KERNELS", first := next(iter(library.own_sets())))
    assert library.describe() == f"{first} (built in, TOKENSWIFT_KERNELS={first})"
    assert library.carried("native") is None
    # one that the processor has, and the library has not
    monkeypatch.setattr(library, "processor", lambda: " ".join(s.needs for s in library.own_sets().values()))
    assert library.carried(list(library.own_sets())[-1]) is None


def _changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _a_byte(folder: Path) -> None:
    content = bytearray((folder / library.LIBRARY).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / library.LIBRARY).unlink()
    (folder / library.LIBRARY).write_bytes(content)


ABOUT = library.ABOUT
#: what happens to a folder with a library, and the reason that is given
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed byte": (_a_byte, "it is damaged"),
    "no library": (lambda folder: (folder / library.LIBRARY).unlink(), "No such file or directory"),
    "nothing said": (lambda folder: (folder / ABOUT).unlink(), "No such file or directory"),
    "no JSON": (lambda folder: (folder / ABOUT).write_bytes(b"\xff{"), f"{ABOUT} is damaged"),
    "deep JSON": (lambda folder: (folder / ABOUT).write_text("[" * 60_000), f"{ABOUT} is damaged"),
    "long JSON": (lambda folder: _changed(folder / ABOUT, more="x" * 100_000), f"{ABOUT} is damaged"),
    "a list": (lambda folder: (folder / ABOUT).write_text("[1]"), f"{ABOUT} is damaged"),
    "sets of numbers": (lambda folder: _changed(folder / ABOUT, sets={"avx2": 1}), f"{ABOUT} is damaged"),
    "sets in a list": (lambda folder: _changed(folder / ABOUT, sets=["avx2"]), f"{ABOUT} is damaged"),
    "another version": (
        lambda folder: (folder.parents[2] / "version.py").write_text('__version__ = "1.1"\n'),
        "it was built from other sources",
    ),
    "another source": (
        lambda folder: (folder.parent / "cpu.c").write_text(LITTLE + "\n"),
        "it was built from other sources",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_another_library_is_not_loaded_and_a_line_says_why(
    built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    monkeypatch.setattr(library, "Carried", None)  # whoever loads it fails
    change, reason = DAMAGES[damage]
    change(built)
    assert library.carried("auto") is None
    said = f"the CPU kernels that came with tokenswift are not used ({reason})"
    assert [record.message for record in caplog.records] == [said]
    monkeypatch.undo()


def test_a_damaged_library_is_replaced_by_a_compiled_one(
    kernels: CpuBackend, built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _a_byte(built)
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setattr(library, "compiled", lambda folder, sets: kernels._lib)
    with caplog.at_level(logging.WARNING):
        backend = targets.make_target(tiny_model("llama")).backend
    assert isinstance(backend, CpuBackend) and backend.build == kernels.build
    assert [record.message[-17:] for record in caplog.records] == ["d (it is damaged)"]


@pytest.mark.slow
def test_the_kernels_of_two_sets_in_one_library_pass_their_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = library.fitting(library.processor())
    own = [name for name, each in wheels.PLATFORMS.items() if each.architecture == library.architecture()]
    if shutil.which("cc") is None or not own:
        pytest.skip("no C compiler, or another kind of processor")
    wheels.make(own[0], tmp_path, ["cc"], sets=sorted({able[0], able[-1]}))
    monkeypatch.setattr(library, "BUILT", tmp_path)
    for name in (able[0], able[-1]):
        carried = library.carried(name)
        assert carried is not None and fault_of(carried) is None
        monkeypatch.setenv("TOKENSWIFT_KERNELS", name)
        monkeypatch.setattr(targets, "_backends", {})
        made = targets.backend_for()
        assert isinstance(made, CpuBackend) and library.key_of(made._lib) == carried.key
