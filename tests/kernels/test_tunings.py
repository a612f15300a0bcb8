"""A row's bits are its own whatever compiler made the kernels, whatever processor they are scheduled for.

Some tunings make a compiler split a fused multiply-add into two roundings in one place and not in another.
The kernels may not leave that to a compiler: here they are compiled for several tunings, and rows of random
shapes run through each.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tests.kernels.rows import Tally, fuzz
from tokenswift.kernels.cpu import library

V3, V4 = "-march=x86-64-v3", "-march=x86-64-v4"
#: instruction set: what /proc/cpuinfo names, and tunings for it
TUNINGS = {
    "x86-64": ("sse2", (("-march=x86-64",),)),
    "x86-64-v3": ("avx2 fma", ((V3,), (V3, "-mtune=haswell"), (V3, "-mtune=znver2"), (V3, "-mtune=znver3"))),
    "x86-64-v4": (
        "avx512vl avx512bw",
        ((V4, "-mtune=skylake-avx512"), (V4, "--param=avoid-fma-max-bits=512"), (V4, "-O2")),
    ),
    "x86-64-v4+bf16": (
        "avx512_bf16",
        tuple((V4, "-mavx512bf16", f"-mtune={tune}") for tune in ("sapphirerapids", "znver2")),
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="tunings are listed for x86-64")
@pytest.mark.parametrize("name", TUNINGS)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_rows_have_their_own_bits(tmp_path: Path, compiler: str, name: str) -> None:
    needed, tunings = TUNINGS[name]
    if shutil.which(compiler) is None or not {*library.processor().split()}.issuperset(needed.split()):
        pytest.skip(f"no {compiler}, or a processor without {needed}")
    found: list[Tally] = []
    for flags in tunings:
        made = library.compiled(tmp_path, (flags,), compiler)
        if isinstance(made, str) and compiler == "clang":
            continue  # an older one, without some of these flags
        assert not isinstance(made, str), flags
        found.append(fuzz(made, range(12)))
        assert not found[-1].wrong and found[-1].rows >= 1000, flags
        assert found[-1].digests == found[0].digests, flags
