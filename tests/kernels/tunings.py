"""The CPU kernels compiled by every compiler found, for every tuning that can run here."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenswift.kernels.cpu import build

_V2 = ("-march=x86-64-v2", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3")
_V3 = ("-march=x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave")
_V4 = ("-march=x86-64-v4", f"{_V3[1]} avx512f avx512bw avx512cd avx512dq avx512vl")
#: instruction sets: flags, and what /proc/cpuinfo of a processor that runs them names
SETS: dict[str, tuple[tuple[str, ...], str]] = {
    "x86-64": (("-march=x86-64",), "sse2"),
    "x86-64-v2": ((_V2[0],), _V2[1]),
    "avx": ((_V2[0], "-mavx"), f"{_V2[1]} avx"),
    "x86-64-v3": ((_V3[0],), _V3[1]),
    "avx512f": ((_V3[0], "-mavx512f"), f"{_V3[1]} avx512f"),
    "x86-64-v4": ((_V4[0],), _V4[1]),
    "x86-64-v4+bf16": ((_V4[0], "-mavx512bf16"), f"{_V4[1]} avx512_bf16"),
}
#: those between the usual ones
RARE = ("avx", "avx512f")
#: what tells the usual ones from each other: a macro that a compiler defines
MACROS = {
    "x86-64-v4+bf16": "__AVX512BF16__",
    "x86-64-v4": "__AVX512VL__",
    "x86-64-v3": "__AVX2__",
    "x86-64-v2": "__SSE4_2__",
}


class Tuning(NamedTuple):
    """An instruction set (a key of :data:`SETS`), the processor that it is scheduled for, a further flag."""

    instructions: str
    tune: str = "generic"
    more: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """For the compiler."""
        more = (self.more,) if self.more else ()
        return (*SETS[self.instructions][0], f"-mtune={self.tune}", *more)

    @property
    def name(self) -> str:
        """For messages and test ids."""
        return ",".join(part for part in self if part)


#: further flags that choose among instructions, as tunings do; the first is in some tunings of newer GCCs
MORE = (
    "--param=avoid-fma-max-bits=512",
    "-mprefer-vector-width=128",
    "-mprefer-vector-width=512",
    "-O1",
    "-O2",
    "-Os",
)


@dataclass(frozen=True)
class Compiler:
    """A C compiler: its name, such as gcc or clang-19, and its path."""

    name: str
    path: str

    def takes(self, *flags: str) -> bool:
        """Whether it compiles an empty file with these flags."""
        command = [self.path, *flags, "-c", "-x", "c", os.devnull, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0

    def tunings(self) -> list[Tuning]:
        """Every tuning and further flag that it knows, for every instruction set of this processor."""
        sets = [name for name in sets_here() if self.takes(*SETS[name][0])]
        processors, flags = self.processors(), [flag for flag in MORE if self.takes(flag)]
        return [
            *(Tuning(instructions, tune) for instructions in sets for tune in processors),
            *(Tuning(instructions, more=flag) for instructions in sets for flag in flags),
        ]

    def processors(self) -> list[str]:
        """All values of -mtune that it lists for processors with 64-bit code."""
        if self.name.startswith("clang"):
            ran = _output(self.path, "--print-supported-cpus")
            listed = re.findall(r"^\t(\S+)$", ran, flags=re.MULTILINE)
        else:
            ran = _output(self.path, "-Q", "--help=target")
            found = re.search(r"valid arguments for -mtune= option:\s*\n(.*)", ran)
            listed = found[1].split() if found else []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            taken = pool.map(lambda tune: self.takes(f"-mtune={tune}", f"-march={_march(tune)}"), listed)
            return [tune for tune, good in zip(listed, taken, strict=True) if good]

    def best_set(self, processor: str) -> str:
        """The usual instruction set that is the best one of a processor: what `-march=native` is there."""
        command = [self.path, f"-march={_march(processor)}", "-dM", "-E", "-x", "c", os.devnull]
        defined = set(_output(*command).split())
        return next((name for name, macro in MACROS.items() if macro in defined), "x86-64")


def _march(tune: str) -> str:
    """What asks for a processor's instructions: clang takes names of 32-bit ones for tuning alone."""
    return "x86-64" if tune in ("generic", "intel") else tune


def _output(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ran.stdout + ran.stderr  # clang lists processors on stderr


@cache
def compilers() -> dict[str, Compiler]:
    """gcc, clang, and every gcc-N and clang-N of the PATH that is not one of those; none that is too old."""
    names: set[str] = set()
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        try:
            names |= {name for name in os.listdir(folder) if re.fullmatch(r"(gcc|clang)(-\d+)?", name)}
        except OSError:
            continue
    found: dict[str, Compiler] = {}
    seen: set[str] = set()
    for name in sorted(names, key=lambda name: ("-" in name, name)):
        path = shutil.which(name)
        if path is not None and os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            if _knows_shuffles(path):
                found[name] = Compiler(name, path)
    for kind in ("gcc", "clang"):  # where there are only numbered ones, the newest
        numbered = [name for name in found if name.startswith(f"{kind}-")]
        if kind not in found and numbered:
            newest = max(numbered, key=lambda name: int(name.split("-")[1]))
            found[kind] = found.pop(newest)
    return found


def _knows_shuffles(path: str) -> bool:
    """Whether a compiler has what the kernels ask of it (GCC before version 12 has not)."""
    code = b"typedef int V __attribute__((vector_size(8)));"
    code += b"V f(V x, V y) { return __builtin_shufflevector(x, y, 0, 2); }"
    command = [path, "-c", "-x", "c", "-", "-o", os.devnull]
    return subprocess.run(command, input=code, capture_output=True, timeout=60, check=False).returncode == 0


@cache
def sets_here() -> list[str]:
    """The instruction sets that this processor runs."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    able = set(build.processor().split())
    return [name for name, (_, needed) in SETS.items() if able.issuperset(needed.split())]


def compile_all(
    compiler: Compiler, tunings: Iterable[Tuning], folder: Path
) -> tuple[dict[Tuning, ctypes.CDLL], list[Tuning]]:
    """The kernels for each tuning, compiled side by side through `build.library` into a folder, and the
    tunings for which there are none."""
    wanted = list(tunings)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda tuning: build.library(folder, (tuning.flags,), compiler.path), wanted))
    both = list(zip(wanted, made, strict=True))
    return {t: library for t, library in both if library is not None}, [t for t, lib in both if lib is None]
