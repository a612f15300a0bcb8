"""The kernels without Python (driver.c): the same lines from every instruction set, and from arm64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenswift.kernels.cpu import build

DRIVER = Path(__file__).with_name("driver.c")
SOURCES = Path(build.__file__).parent
RUN = [name for name in build.INSTRUCTION_SETS if build.targets_of(name) is not None]
ARM, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def printed(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> list[str]:
    """What the driver prints, compiled with these flags."""
    program = str(folder / "driver")
    shared = [flag for flag in build.FLAGS if flag != "-fPIC"]
    command = [compiler, *shared, *flags, f"-I{SOURCES}", str(DRIVER), "-o", program, "-lm"]
    subprocess.run(command, check=True, timeout=600)
    done = subprocess.run([*emulator, program], check=True, timeout=1200, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) > 200
    return lines


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if (compiler := shutil.which("cc")) is None or not RUN:
        pytest.skip("no C compiler, or another kind of processor")
    return printed(tmp_path_factory.mktemp("plain"), compiler, *build.INSTRUCTION_SETS["x86-64"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN[1:])
def test_an_instruction_set_prints_what_plain_x86_64_does(
    name: str, plain: list[str], tmp_path: Path
) -> None:
    assert printed(tmp_path, "cc", *build.INSTRUCTION_SETS[name][0]) == plain


@pytest.mark.slow
@pytest.mark.skipif(None in (shutil.which(ARM), shutil.which(EMULATOR)), reason=f"no {ARM}, or no {EMULATOR}")
def test_arm64_prints_what_plain_x86_64_does(plain: list[str], tmp_path: Path) -> None:
    assert printed(tmp_path, ARM, "-static", emulator=(EMULATOR,)) == plain
