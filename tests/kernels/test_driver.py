"""The kernels without Python (driver.c): the same lines from every instruction set, compiler and tuning, and
from arm64.

Some tunings make a compiler split a fused multiply-add into two roundings in one place and not in another.
The kernels may not leave that to a compiler.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tokenswift.kernels.cpu import library

DRIVER = Path(__file__).with_name("driver.c")
RUN = library.fitting(library.processor())
V3, V4 = "-march=x86-64-v3", "-march=x86-64-v4"
#: instruction set: tunings for it
TUNINGS = {
    "avx2": ((V3, "-mtune=znver2"), (V3, "-mtune=znver3")),
    "avx512": ((V4, "-mtune=znver2"), (V4, "--param=avoid-fma-max-bits=512"), (V4, "-O2")),
    "avx512-bf16": ((V4, "-mavx512bf16", "-mtune=znver2"),),
}
ARM = "aarch64-linux-gnu-gcc"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
#: abilities of arm64, and a processor that has no others
ARMS = {"armv8-a": "cortex-a53", "armv8.2-a+dotprod": "cortex-a76", "armv8.2-a+dotprod+i8mm+bf16": "max"}
#: where bfloat16 enters products, how far off they may be by the size of what comes out (of a product, of two
#: layers), or in steps of bfloat16, which attention is rounded to
FAR = {"product": 1e-5, "chain": 1.0, "tree": 1.0, "layers": 2**-6}

Case = tuple[tuple[str, ...], bytes]  # a line's words, the last one a hash; what came out


def ran(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> list[Case]:
    """What the driver prints and writes, compiled with these flags."""
    program, written = str(folder / "driver"), folder / "written"
    shared = [flag for flag in library.FLAGS if flag != "-fPIC"]
    command = [compiler, *shared, *flags, f"-I{library.HERE}", str(DRIVER), "-o", program, "-lm"]
    subprocess.run(command, check=True, timeout=600)
    words = [*emulator, program, str(written)]
    done = subprocess.run(words, check=True, timeout=1200, capture_output=True, text=True)
    found, at, cases = written.read_bytes(), 0, []
    for line in map(str.split, done.stdout.splitlines()):
        size = int(line[5])
        cases.append((tuple(line), found[at : at + size]))
        at += size
    assert len(cases) > 200 and at == len(found)
    return cases


def rounds_its_own_way(words: tuple[str, ...]) -> bool:
    """Whether bfloat16 enters the case's products: as activations, or as keys and values."""
    return words[2 if words[0] == "product" else 1] == "1" and words[0] in FAR


def numbers(case: Case) -> np.ndarray:
    words, found = case
    if words[0] in ("chain", "tree"):
        return (np.frombuffer(found, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(found, np.float32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    if (compiler := shutil.which("cc")) is None or "avx2" not in RUN:
        pytest.skip("no C compiler, or another kind of processor")
    return ran(tmp_path_factory.mktemp("plain"), compiler, *library.own_sets()["avx2"][0])


def compare(found: list[Case], plain: list[Case], rounds: bool) -> None:
    """The same bits; but where the processor has products of bfloat16 (``rounds``), these are near."""
    own = [i for i, (words, _) in enumerate(found) if rounds and rounds_its_own_way(words)]
    same = [i for i in range(len(found)) if i not in own]
    assert [found[i][0] for i in same] == [plain[i][0] for i in same]
    assert len(own) in (0, 117), "products of 13 kinds of weights, 12 attentions, one model"
    for i in own:
        x, y = numbers(found[i]).astype(float), numbers(plain[i]).astype(float)
        size = np.sqrt((y * y).mean())
        if found[i][0][0] in ("chain", "tree"):  # a step of each number, or of a tenth of the size
            size = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(y), size / 10))) - 7)
        far = (np.abs(x - y) / size).max()
        assert found[i][0][:-1] == plain[i][0][:-1] and far <= FAR[found[i][0][0]], found[i][0]
    changed = sum(found[i][0] != plain[i][0] for i in own)
    assert not own or changed > 50, "the dot product of bfloat16 is used"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", RUN)
def test_an_instruction_set_prints_what_avx2_does(
    name: str, compiler: str, plain: list[Case], tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    compare(ran(tmp_path, compiler, *library.own_sets()[name][0]), plain, "bf16" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name, flags", [(name, flags) for name in TUNINGS for flags in TUNINGS[name]])
def test_tunings_of_gcc_print_it(
    name: str, flags: tuple[str, ...], plain: list[Case], tmp_path: Path
) -> None:
    if shutil.which("gcc") is None or name not in RUN:
        pytest.skip(f"no GCC, or a processor without {name}")
    compare(ran(tmp_path, "gcc", *flags), plain, "bf16" in name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(ARM) is None or EMULATOR is None, reason=f"no {ARM}, or no qemu-aarch64")
@pytest.mark.parametrize("abilities", ARMS)
def test_arm64_prints_what_avx2_does(abilities: str, plain: list[Case], tmp_path: Path) -> None:
    assert EMULATOR is not None
    emulator = (EMULATOR, "-cpu", ARMS[abilities])
    compare(
        ran(tmp_path, ARM, f"-march={abilities}", "-static", emulator=emulator), plain, "bf16" in abilities
    )
