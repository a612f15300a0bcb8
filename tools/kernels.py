"""Compiles the CPU kernels of a platform into a folder, a library for each instruction set, for its
wheel.

``setup.py`` runs this file by itself, and so may anybody::

    python tools/kernels.py linux-aarch64 FOLDER --compiler "aarch64-linux-gnu-gcc" --sets neon
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "src")
)  # where the package is not installed

from tokenswift.kernels.cpu import compilers, library  # noqa: E402


class Platform(NamedTuple):
    """What a wheel is built for: architecture, target of ``zig cc``, tag of the wheel, the compiler
    if it is not ``zig cc``, which links in any case: against an early glibc, whatever this machine
    has, and the linker's own flags."""

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
        "arm64",
        "aarch64-macos.14.0",
        "macosx_14_0_arm64",
        link=("-Wl,-install_name,@rpath/kernels.so",),
    ),
}


class BuildError(Exception):
    """A library could not be compiled; in one line."""


def entries() -> list[str]:
    """The names that the sources export."""
    names: set[str] = set()
    for source in library.SOURCES:
        text = (library.HERE / source).read_text(encoding="utf-8")
        names.update(re.findall(r"\bts_\w+", text))
    return sorted(names)


def zig(target: str) -> list[str]:
    """The compiler of the package ``ziglang`` for a target, such as "aarch64-linux-gnu.2.28"."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def flags_for(name: str, architecture: str, compiler: Sequence[str]) -> list[str]:
    """All flags of an instruction set; zig writes the names of processors in its own way."""
    flags = library.SETS[architecture][name].flags
    if "ziglang" in compiler or Path(compiler[0]).stem == "zig":
        flags = tuple(map(_for_zig, flags))
    return [*library.FLAGS, *flags]


def _for_zig(flag: str) -> str:
    if flag.startswith("-march=arm"):  # a processor, not an architecture
        _, *abilities = flag.split("+")
        return "+".join(["-mcpu=generic", *abilities])
    return f"-{flag[1:].replace('-', '_')}" if flag.startswith("-march=") else flag


def compile_set(
    name: str, wanted: Platform, compiler: Sequence[str], linker: Sequence[str], out: Path
) -> Path:
    """The library of an instruction set, in a folder.

    Args:
        compiler, linker: commands that take GCC's options.
    Raises:
        BuildError: one of them refuses.
    """
    flags = flags_for(name, wanted.architecture, compiler)
    file = out / library.carried_name(name)
    build = " ".join([Path(compiler[0]).name, *compiler[1:], *flags])
    if "ziglang" in compiler:
        build = build.partition("-m ")[2]
    build = re.sub(r'[\\"]', "", build)
    with tempfile.TemporaryDirectory(prefix="tokenswift-") as work:
        compiled = str(Path(work) / "kernels.o")
        source = str(library.HERE / library.SOURCES[0])
        _run([*compiler, *flags, f'-DTS_BUILD="{build}"', "-c", source, "-o", compiled])
        _run([*linker, "-shared", "-pthread", "-s", *wanted.link, compiled, "-o", str(file), "-lm"])
    return file


def names_of(built_for: str) -> list[str]:
    """The files of a platform's libraries."""
    return [library.carried_name(name) for name in library.SETS[PLATFORMS[built_for].architecture]]


def make(
    built_for: str,
    out: Path,
    compiler: Sequence[str] | None = None,
    linker: Sequence[str] | None = None,
    sets: Sequence[str] | None = None,
) -> list[Path]:
    """Compile the libraries of a platform into a folder, in place of those in it.

    Args:
        built_for: a key of :data:`PLATFORMS`.
        compiler, linker: commands; by default the platform's, and ``zig cc`` or the compiler that
            is given.
        sets: names of instruction sets; by default all that the architecture has.
    Raises:
        BuildError: the compiler or the linker refuses, or names that nobody knows.
    """
    if built_for not in PLATFORMS:
        raise BuildError(f"platform is {built_for!r}; valid: {', '.join(PLATFORMS)}")
    wanted = PLATFORMS[built_for]
    known = library.SETS[wanted.architecture]
    chosen = list(sets or known)
    if unknown := [name for name in chosen if name not in known]:
        raise BuildError(f"instruction set is {unknown[0]!r}; valid: {', '.join(known)}")
    linker = linker or compiler or zig(wanted.target)
    compiler = compiler or ([wanted.compiler] if wanted.compiler else zig(wanted.target))
    out.mkdir(parents=True, exist_ok=True)
    for older in out.glob("*.so"):
        older.unlink()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda name: compile_set(name, wanted, compiler, linker, out), chosen))


def _run(command: list[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, timeout=compilers.TIMEOUT, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(" ".join(str(error).split())[:200]) from error
    if ran.returncode:
        lines = ran.stderr.decode(errors="replace").strip().splitlines()
        reason = next((line for line in lines if "error" in line), "".join(lines[:1]))
        raise BuildError(f"{command[0]} ended with {ran.returncode}: {reason[:200]}")


def main() -> None:
    """Make the libraries of a platform, from the command line."""
    parser = argparse.ArgumentParser(
        description="Compile the CPU kernels of a platform into a folder."
    )
    parser.add_argument("platform", choices=list(PLATFORMS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--compiler", type=shlex.split, help="by default GCC on Linux, else zig cc")
    parser.add_argument(
        "--linker", type=shlex.split, help="by default the compiler if given, else zig cc"
    )
    parser.add_argument("--sets", nargs="+", help="by default all of the architecture")
    options = parser.parse_args()
    try:
        libraries = make(
            options.platform, options.out, options.compiler, options.linker, options.sets
        )
        print(*libraries, sep="\n")
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
