"""Kernels that come with the package: which instruction set is taken, and that no other library
ever is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.check import fault_of
from tokenswift.models import target as targets
from tools import kernels as wheels

AVX2 = "sse2 avx avx2 fma f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


def test_the_best_set_of_the_processor_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, report, taken in (
        ("x86_64", "sse2 avx", None),
        ("AMD64", AVX2, "avx2"),
        ("x86_64", f"{AVX2} avx512f avx512cd", "avx2"),  # Xeon Phi
        ("x86_64", f"{AVX512} avx512_vnni avx512_bf16 avx_vnni", "avx512-bf16"),
        ("arm64", "asimddp i8mm", "neon-dotprod"),
        ("riscv64", "asimddp avx2", None),
    ):
        monkeypatch.setattr(library.platform, "machine", lambda machine=machine: machine)
        assert [None, *library.fitting(report)][-1] == taken


def carry(folder: Path, monkeypatch: pytest.MonkeyPatch, *sets: str) -> None:
    """A folder of libraries that the package is taken to carry."""
    platforms = [
        name
        for name, each in wheels.PLATFORMS.items()
        if each.architecture == library.architecture()
    ]
    if shutil.which("cc") is None or not platforms:
        pytest.skip("no C compiler, or another kind of processor")
    wheels.make(platforms[0], folder, ["cc"], sets=sets)
    monkeypatch.setattr(library, "BUILT", folder)
    monkeypatch.delenv("TOKENSWIFT_KERNELS", raising=False)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two sets, from a short source."""
    here = tmp_path / "kernels" / "cpu"
    here.mkdir(parents=True)
    (here / "cpu.c").write_text("int ts_answer(void) { return 42; }\n")
    (tmp_path / "version.py").write_text('__version__ = "1.0"\n')
    monkeypatch.setattr(library, "HERE", here)
    monkeypatch.setattr(library, "SOURCES", ("cpu.c",))
    carry(here / "built", monkeypatch, *list(library.instruction_sets())[:2])
    return here / "built"


def test_each_set_has_its_library(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, each in list(library.instruction_sets().items())[:2]:
        monkeypatch.setattr(library, "processor", lambda needs=each.needs: f"a processor {needs}")
        carried = library.carried("auto")
        assert carried is not None
        assert carried.ts_answer() == 42
        assert library.describe() == f"{name} (built in)"
    first = next(iter(library.instruction_sets()))
    monkeypatch.setenv("TOKENSWIFT_KERNELS", first)
    assert library.describe() == f"{first} (built in)"
    assert library.carried("native") is None


#: what happens to a folder of libraries
DAMAGES: dict[str, Callable[[Path], object]] = {
    "no library": lambda folder: [path.unlink() for path in folder.iterdir()],
    "another version": lambda folder: (folder.parents[2] / "version.py").write_text(
        '__version__ = "1.1"\n'
    ),
    "another source": lambda folder: (folder.parent / "cpu.c").write_text("int ts_answer;\n"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_another_library_is_not_loaded_and_a_line_says_so(
    built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: pytest.fail("loaded"))
    DAMAGES[damage](built)
    with monkeypatch.context() as patch:
        patch.setattr(library, "compiled", lambda folder, *_: "compiled")
        assert library.library(built) == "compiled"
    assert [record.message[:62] for record in caplog.records] == [
        "the CPU kernels that came with tokenswift are not used: they a"
    ]


@pytest.mark.slow
def test_the_kernels_of_a_wheel_pass_their_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = library.fitting(library.processor())
    carry(tmp_path, monkeypatch, *{able[0], able[-1]})
    for name in (able[0], able[-1]):
        carried = library.carried(name)
        assert carried is not None
        assert fault_of(carried) is None
        monkeypatch.setenv("TOKENSWIFT_KERNELS", name)
        monkeypatch.setattr(targets, "_backends", {})
        backend = targets.backend_for()
        assert isinstance(backend, CpuBackend)
        assert backend._lib._name == carried._name
