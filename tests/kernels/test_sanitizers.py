"""The kernels' own tests once more, with kernels under ASan and UBSan."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kernels import sanitized
from tokenswift.kernels.cpu.library import processor

TARGETS = {"native": ("-march=native",), "avx2": ("-mavx2", "-mfma", "-mf16c")}
#: tests that call all kernels with rows and trees of all kinds, and with what is to be refused
TESTS = (
    "kernels/test_kernels.py",
    "kernels/test_int8.py",
    "kernels/test_formats.py",
    "kernels/test_buffers.py",
    "kernels/test_foreign_ids.py",
    "kernels/test_experts.py",
    "kernels/test_recurrent.py",
    "sampling/test_choose.py",
    "sampling/test_adjust.py",
)


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sanitized.runtime() is None or request.param == "avx2" and "avx2" not in processor():
        pytest.skip("no GCC with ASan here, or a processor without AVX2")
    folder = tmp_path_factory.mktemp("sanitized")
    return sanitized.compiled(TARGETS[request.param], folder / "kernels.so")


@pytest.mark.slow
def test_nothing_is_found(library: Path) -> None:
    arguments = ["-p", "no:cacheprovider", "-x", "-m", "not slow"]
    arguments += ["-W", "ignore:Module already imported"]  # tokenswift is, before pytest begins
    arguments += [f"tests/{name}" for name in TESTS]
    result = run(library, "pytest", arguments)
    assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]


def run(library: Path, module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """A module run as a program with these kernels."""
    command = sanitized.command(library, module, arguments)
    return subprocess.run(**command, capture_output=True, timeout=1200, check=False)
