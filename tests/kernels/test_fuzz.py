"""Random calls of the kernels, valid and invalid; under ASan and UBSan, too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import OTHER
from tests.kernels import sanitized
from tests.kernels.fuzz import Fuzz
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.library import processor

TARGETS = {"native": ("-march=native",), **OTHER}


@pytest.mark.parametrize("seed", range(2))
@torch.inference_mode()
def test_random_calls(kernels: CpuBackend, seed: int) -> None:
    Fuzz(kernels._lib, seed).run(30)


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels with the sanitizers, for each kind of processor."""
    if sanitized.runtime() is None:
        pytest.skip("no GCC with ASan here")
    if request.param == "avx2" and "avx2" not in processor():
        pytest.skip("this processor has no AVX2")
    folder = tmp_path_factory.mktemp("sanitized")
    return sanitized.compiled(TARGETS[request.param], folder / "kernels.so")


@pytest.mark.slow
def test_random_calls_under_sanitizers(library: Path) -> None:
    ran = run(library, "tests.kernels.fuzz", "100", "1200")
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-8000:]
    assert ran.stdout.rstrip().endswith("done")


@pytest.mark.slow
def test_sanitizers_see_a_row_too_many(library: Path) -> None:
    """Without this, silence would prove nothing."""
    ran = run(library, "tests.kernels.planted_overrun")
    assert ran.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in ran.stderr
    assert "reached" not in ran.stdout


def run(library: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A module run as a program with these kernels."""
    told = sanitized.command(library, module, *arguments)
    return subprocess.run(**told, capture_output=True, timeout=1200, check=False)
