"""The kernels compiled beforehand: for each instruction set of a platform, in the one library of a wheel.

Made when a wheel is built (`make`), found and chosen from when kernels are loaded (`choice`). The library's
entries end with the name of their instruction set; ``kernels.json`` beside it says which sets there are, what
compiled them, the library's SHA-256, and the hash of the sources. A library of other sources, or a damaged
one, is not used. Nothing but the standard library is imported here: ``setup.py`` runs this file by itself,
and so may anybody::

    python prebuilt.py linux-aarch64 FOLDER --compiler "aarch64-linux-gnu-gcc" --sets neon
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"
LIBRARY, ABOUT = "kernels.so", "kernels.json"
SOURCES = (
    "cpu.c",
    "cpu_attention.h",
    "cpu_tile.h",
    "cpu_team.h",
    "cpu_choose.h",
    "cpu_adjust.h",
    "cpu_low.h",
    "cpu_int.h",
    "cpu_int_attention.h",
    "cpu_merge.h",
    "cpu_linear.h",
    "cpu_pack.h",
    "cpu_draft.h",
)
#: no contraction: what is rounded once is written as such (`fused` in cpu_tile.h), whatever the tuning
FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-pthread", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
TIMEOUT = 600  # seconds for one compilation; a machine that builds wheels may be busy
MOST_ABOUT = 1 << 16  # bytes of kernels.json


class InstructionSet(NamedTuple):
    """Flags of GCC and clang, and what a processor that has the set calls its abilities, as Linux does."""

    flags: tuple[str, ...]
    needs: str


_V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
_ARM = "-march=armv8.2-a+dotprod"
#: by architecture, from the plainest to the best: the last one that a processor has is taken
SETS: dict[str, dict[str, InstructionSet]] = {
    "x86_64": {
        "x86-64": InstructionSet(("-march=x86-64",), ""),
        "avx2": InstructionSet(("-march=x86-64-v3",), "avx2 fma f16c bmi2"),
        "avx2-vnni": InstructionSet(("-march=x86-64-v3", "-mavxvnni"), "avx2 fma f16c bmi2 avx_vnni"),
        "avx512": InstructionSet(("-march=x86-64-v4",), _V4),
        "avx512-vnni": InstructionSet(("-march=x86-64-v4", "-mavx512vnni"), f"{_V4} avx512_vnni"),
        "avx512-bf16": InstructionSet(
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), f"{_V4} avx512_vnni avx512_bf16"
        ),
    },
    "arm64": {
        "neon": InstructionSet(("-march=armv8-a",), ""),
        "neon-dotprod": InstructionSet((_ARM,), "asimddp"),
        "neon-i8mm": InstructionSet((f"{_ARM}+i8mm",), "asimddp i8mm"),
        "neon-bf16": InstructionSet((f"{_ARM}+i8mm+bf16",), "asimddp i8mm bf16"),
    },
}


class Platform(NamedTuple):
    """What a wheel is built for: architecture, target of ``zig cc``, tag of the wheel, the compiler if it
    is not ``zig cc``, which links in any case: against an early glibc, whatever this machine has, and the
    linker's own flags."""

    architecture: str
    target: str
    tag: str
    compiler: str = ""
    link: tuple[str, ...] = ()


PLATFORMS = {
    "linux-x86_64": Platform("x86_64", "x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64", "gcc"),
    "linux-aarch64": Platform(
        "arm64", "aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64", "aarch64-linux-gnu-gcc"
    ),
    "macos-arm64": Platform(  # a library's own name there is else where it was linked
        "arm64", "aarch64-macos.14.0", "macosx_14_0_arm64", link=(f"-Wl,-install_name,@rpath/{LIBRARY}",)
    ),
}


class BuildError(Exception):
    """A library could not be compiled; in one line."""


# ---- at run time ------------------------------------------------------------------------------------------


def architecture() -> str:
    """Of this machine: a key of :data:`SETS`, or another name."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)


def own_sets() -> dict[str, InstructionSet]:
    """The instruction sets of this machine's architecture."""
    return SETS.get(architecture(), {})


def fitting(abilities: str) -> list[str]:
    """Names of the sets that a processor with these abilities runs, the best one last."""
    able = set(abilities.split())
    return [name for name, each in own_sets().items() if able.issuperset(each.needs.split())]


class Carried(ctypes.CDLL):
    """A library's entries for one instruction set, by the names that the sources give them.

    Args:
        path: of the library.
        name: of the instruction set.
        key: what stands for this code on this processor, as a compiled library's file name does.
    """

    def __init__(self, path: Path, name: str, key: str) -> None:
        super().__init__(str(path))
        self.instructions, self.key = name, key

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("ts_"):
            return super().__getattr__(name)
        entry = super().__getattr__(name + suffix(self.instructions))
        setattr(self, name, entry)  # one object a name: its types of arguments are set on it
        return entry


def text_of(library: ctypes.CDLL, name: str) -> str:
    """The value of an array of characters of a library."""
    if isinstance(library, Carried):
        name += suffix(library.instructions)
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, name))).decode()


def about(folder: Path) -> dict[str, str] | str | None:
    """What made each instruction set of the library in a folder; why it cannot be used; None: there is none.

    The library is read whole, to compare its checksum.
    """
    library, told = folder / LIBRARY, folder / ABOUT
    try:
        if not told.exists() and not library.exists():
            return None
        with told.open("rb") as file:
            said = json.loads(file.read(MOST_ABOUT))
        sets, digest = said["sets"], said["sha256"]
        if said["stamp"] != stamp():
            return "it was built from other sources"
        if not (isinstance(sets, dict) and all(isinstance(each, str) for each in sets.values())):
            return f"{ABOUT} is damaged"
        if hashlib.sha256(library.read_bytes()).hexdigest() != digest:
            return "it is damaged"
    except OSError as error:
        return f"{error.strerror or error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{ABOUT} is damaged"
    return sets


def choice(wanted: str, abilities: str, there: Sequence[str]) -> str | None:
    """The instruction set to use of those that are there; None where none of them is what is wanted.

    Args:
        wanted: "auto", or the name of a set that the processor has.
        abilities: of the processor.
    """
    able = [name for name in fitting(abilities) if name in there]
    if wanted == "auto":
        return able[-1] if able else None
    return wanted if wanted in able else None


def load(wanted: str, processor: str, folder: Path) -> Carried | str | None:
    """The entries of the library in a folder; why they cannot be had; None where there is no library, or no
    such set in it.

    Args:
        wanted, processor: see :func:`choice`.
    """
    found = about(folder)
    if found is None or isinstance(found, str):
        return found
    name = choice(wanted, processor, list(found))
    if name is None:
        return None
    key = hashlib.sha256(f"{stamp()} {name} {processor}".encode()).hexdigest()[:20]
    try:
        carried = Carried(folder / LIBRARY, name, f"kernels-{key}-{name}")
        text_of(carried, "ts_build")
    except (OSError, ValueError, AttributeError) as error:  # of another platform, or without the entries
        return " ".join(str(error).split())[:200]
    return carried


# ---- when a wheel is built --------------------------------------------------------------------------------


def stamp() -> str:
    """A hash of what a library is made from, and of the package's version."""
    parts = [repr(FLAGS), repr(SETS), (HERE.parent.parent / "version.py").read_text(encoding="utf-8")]
    parts += [(HERE / name).read_text(encoding="utf-8") for name in SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def suffix(name: str) -> str:
    """What the entries of an instruction set end with."""
    return "__" + name.replace("-", "_")


def entries() -> list[str]:
    """The names that the sources export."""
    found = set()
    for name in SOURCES:
        found.update(re.findall(r"\bts_\w+", (HERE / name).read_text(encoding="utf-8")))
    return sorted(found)


def zig(target: str) -> list[str]:
    """The compiler of the package ``ziglang`` for a target, such as "aarch64-linux-gnu.2.28"."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def flags_for(name: str, architecture: str, compiler: Sequence[str]) -> list[str]:
    """All flags of an instruction set; zig writes the names of processors in its own way."""
    own = SETS[architecture][name].flags
    if "ziglang" in compiler or Path(compiler[0]).stem == "zig":
        own = tuple(map(_for_zig, own))
    return [*FLAGS, *own]


def _for_zig(flag: str) -> str:
    if flag.startswith("-march=arm"):  # a processor, not an architecture
        _, *abilities = flag.split("+")
        return "+".join(["-mcpu=generic", *abilities])
    return f"-{flag[1:].replace('-', '_')}" if flag.startswith("-march=") else flag


def compile_set(name: str, architecture: str, compiler: Sequence[str], folder: Path) -> Path:
    """An object file with the entries of an instruction set.

    Args:
        compiler: a command that takes GCC's options.
        folder: where to put it.
    Raises:
        BuildError: the compiler refuses.
    """
    flags = flags_for(name, architecture, compiler)
    made = folder / f"{name}.o"
    told = " ".join([Path(compiler[0]).name, *compiler[1:], *flags])
    if "ziglang" in compiler:
        told = told.partition("-m ")[2]
    told = re.sub(r'[\\"]', "", told)
    renamed = [f"-D{entry}={entry}{suffix(name)}" for entry in entries()]
    _run([*compiler, *flags, *renamed, f'-DTS_BUILD="{told}"', "-c", str(HERE / SOURCES[0]), "-o", str(made)])
    return made


def make(
    built_for: str,
    out: Path,
    compiler: Sequence[str] | None = None,
    linker: Sequence[str] | None = None,
    sets: Sequence[str] | None = None,
) -> Path:
    """Compile the library of a platform, sets side by side, and what is said about it, into a folder.

    Args:
        built_for: a key of :data:`PLATFORMS`.
        compiler, linker: commands; by default the platform's, and ``zig cc`` or the compiler that is given.
        sets: names of instruction sets; by default all that the architecture has.
    Raises:
        BuildError: the compiler or the linker refuses, or names that nobody knows.
    """
    if built_for not in PLATFORMS:
        raise BuildError(f"platform is {built_for!r}; valid: {', '.join(PLATFORMS)}")
    wanted = PLATFORMS[built_for]
    known = SETS[wanted.architecture]
    chosen = list(sets or known)
    if unknown := [name for name in chosen if name not in known]:
        raise BuildError(f"instruction set is {unknown[0]!r}; valid: {', '.join(known)}")
    linker = linker or compiler or zig(wanted.target)
    compiler = compiler or ([wanted.compiler] if wanted.compiler else zig(wanted.target))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tokenswift-") as work:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(
                pool.map(lambda name: compile_set(name, wanted.architecture, compiler, Path(work)), chosen)
            )
        library = out / LIBRARY
        _run(
            [
                *linker,
                "-shared",
                "-pthread",
                "-s",
                *wanted.link,
                *map(str, objects),
                "-o",
                str(library),
                "-lm",
            ]
        )
    said = {
        "stamp": stamp(),
        "platform": built_for,
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "sets": {name: " ".join(flags_for(name, wanted.architecture, compiler)) for name in chosen},
    }
    (out / ABOUT).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return library


def _run(command: list[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(" ".join(str(error).split())[:200]) from error
    if ran.returncode:
        lines = ran.stderr.decode(errors="replace").strip().splitlines()
        reason = next((line for line in lines if "error" in line), "".join(lines[:1]))
        raise BuildError(f"{command[0]} ended with {ran.returncode}: {reason[:200]}")


def main() -> None:
    """Make the library of a platform, from the command line."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels of a platform into a folder.")
    parser.add_argument("platform", choices=list(PLATFORMS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--compiler", type=shlex.split, help="by default GCC on Linux, else zig cc")
    parser.add_argument("--linker", type=shlex.split, help="by default the compiler if given, else zig cc")
    parser.add_argument("--sets", nargs="+", help="by default all of the architecture")
    given = parser.parse_args()
    try:
        print(make(given.platform, given.out, given.compiler, given.linker, given.sets))
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
