"""Builds the sdist and a wheel of each platform, and tries those that this machine can run: ``make
wheels``.

Each wheel is built from the sdist, with kernels that stay in build/kernels while their sources do.
Linux wheels are checked by auditwheel against the glibc of their tag, the library for macOS by what
a Mac's loader would read of it. A wheel is tried in a new environment, with nothing but it and what
it asks for, and no compiler in reach: the default model writes 20 tokens, and ``tokenswift audit``
    has to find nothing.
"""

# macholib comes with the extra "wheels":
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenswift.kernels.cpu import library
from tools import kernels

ROOT = Path(__file__).resolve().parent.parent
MOST = 40 << 20  # bytes of a wheel
HERE = {
    "linux-x86_64": ("linux", "x86_64"),
    "linux-aarch64": ("linux", "arm64"),
    "macos-arm64": ("darwin", "arm64"),
}
#: which package of Debian has a compiler
PACKAGES = {"gcc": "gcc", "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu"}
PAGE = 1 << 14  # bytes of a page of memory of Apple silicon
#: which the linker adds to what is exported
ADDED = {"__mh_dylib_header", "___dso_handle"}
#: functions that macOS lacks
LACKING = ("barrier", "affinity", "futex", "sched_", "getauxval")


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints; ends the program where it fails."""
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(
            f"error: {command[0]} {command[1]} … ended with {ran.returncode}\n{ran.stdout[-2000:]}"
        )
    return ran.stdout


def sdist(out: Path) -> Path:
    """The sdist, made anew."""
    with tempfile.TemporaryDirectory() as work:
        run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", work)
        made = next(Path(work).glob("*.tar.gz"))
        return Path(shutil.copy(made, out))


def check_compilers(platforms: Iterable[str]) -> None:
    """End the program where a platform's compiler is not there, with the package of Debian that has
    it."""
    for platform in platforms:
        compiler = kernels.PLATFORMS[platform].compiler
        if compiler and shutil.which(compiler) is None and not built(platform):
            package = PACKAGES[compiler]
            sys.exit(
                f"error: {platform} needs {compiler}, which is not there; valid: install {package} "
                f"(apt-get install {package}), or leave the platform out (make wheels PLATFORMS=…)"
            )


def built(platform: str) -> bool:
    """Whether the kernels of a platform were compiled before, from these sources."""
    folder = ROOT / "build" / "kernels" / platform
    return all((folder / name).exists() for name in kernels.names_of(platform))


def wheel(source: Path, platform: str, out: Path) -> Path:
    """A platform's wheel, built from the sdist and checked."""
    tag, folder = kernels.PLATFORMS[platform].tag, ROOT / "build" / "kernels" / platform
    if not built(platform):
        kernels.make(platform, folder)
    with tempfile.TemporaryDirectory() as work:
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
        run(
            *pip,
            "--wheel-dir",
            work,
            source,
            TOKENSWIFT_WHEEL=platform,
            TOKENSWIFT_WHEEL_KERNELS=str(folder),
        )
        made = next(Path(work).glob("*.whl"))
        if tag.startswith("manylinux"):
            least = re.search(
                r"manylinux_2_(\d+)_", run(sys.executable, "-m", "auditwheel", "show", made)
            )
            if least is None or int(least[1]) > int(tag.split("_")[2]):
                sys.exit(
                    f"error: {made.name} needs "
                    f"{least[0] if least else 'a newer glibc, or other libraries'}"
                )
        found = Path(shutil.copy(made, out))
    if not found.name.endswith(f"-py3-none-{tag}.whl"):
        sys.exit(f"error: the wheel is {found.name}; it should be for {tag}")
    if (size := found.stat().st_size) > MOST:
        sys.exit(f"error: {found.name} has {size:,} bytes; valid: at most {MOST:,}")
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(found) as archive:
        archive.extractall(work)
        inside = Path(work) / "tokenswift/kernels/cpu/built"
        if {path.name for path in inside.glob("*")} != set(kernels.names_of(platform)):
            sys.exit(f"error: {found.name}: its kernels are not those of its sources")
        for made_for in inside.iterdir() if platform.startswith("macos") else ():
            if fault := fault_for_mac(made_for):
                sys.exit(f"error: {found.name}: {made_for.name}: {fault}")
    return found


def fault_for_mac(path: Path) -> str | None:
    """What a Mac would not load, or should not find, in a library for macOS; None: nothing.

    Read with macholib: processor, load commands and symbols.
    """
    from macholib import mach_o
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    read = MachO(str(path))
    header = read.headers[0]
    kinds = (mach_o.CPU_TYPE_NAMES.get(int(header.header.cputype)), int(header.header.filetype))
    if len(read.headers) > 1 or kinds != ("ARM64", mach_o.MH_DYLIB):
        return "it is no library for arm64 alone"
    found: dict[int, list[Any]] = {}
    for load, command, content in header.commands:
        found.setdefault(int(load.cmd), []).append((command, content))
    if mach_o.LC_CODE_SIGNATURE not in found:
        return "it is not signed, which Apple silicon asks of all code"
    least = [
        (int(each.platform), int(each.minos)) for each, _ in found.get(mach_o.LC_BUILD_VERSION, [])
    ]
    major = int(kernels.PLATFORMS["macos-arm64"].tag.split("_")[1])
    if least != [(mach_o.PLATFORM_MACOS, major << 16)]:
        return f"platform and least version are {least}; they should be macOS and {major}.0"
    if any(each.vmaddr % PAGE or each.fileoff % PAGE for each, _ in found[mach_o.LC_SEGMENT_64]):
        return f"a segment does not begin on a page of {PAGE:,} bytes"
    named = [content.rstrip(b"\0").decode() for _, content in found[mach_o.LC_ID_DYLIB]]
    if named != ["@rpath/kernels.so"]:
        return f"it calls itself {named[0]}"
    kept = {
        mach_o.LC_LOAD_DYLIB,
        mach_o.LC_LOAD_WEAK_DYLIB,
        mach_o.LC_REEXPORT_DYLIB,
        mach_o.LC_RPATH,
    }
    linked = [content.rstrip(b"\0").decode() for kind in kept for _, content in found.get(kind, [])]
    if linked != ["/usr/lib/libSystem.B.dylib"]:
        return (
            f"it asks for {', '.join(linked) or 'no library'}; it should ask for the system's alone"
        )
    external = [
        (name.decode(), each.n_sect)
        for each, name in SymbolTable(read, header).nlists
        if each.n_type & mach_o.N_EXT
    ]
    given = {name for name, section in external if section} - ADDED
    entries = {f"_{entry}" for entry in kernels.entries()}
    if given != entries:
        return f"it exports others than its entries: {', '.join(sorted(given ^ entries)[:4])}"
    if lacking := [
        name for name, section in external if not section and any(map(name.count, LACKING))
    ]:
        return f"it calls {lacking[0]}, which macOS does not have"
    return None


def tried(made: Path, work: Path) -> str:
    """What the installed command says of itself, after it has written and audited without a
    compiler."""
    run(sys.executable, "-m", "venv", work / "venv")
    python = work / "venv/bin/python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        made,
        PYTHONPATH="",
    )
    command = work / "venv/bin/tokenswift"
    # no compiler is in the environment's own folder, and nothing else is in reach
    alone = {"PATH": str(command.parent), "PYTHONPATH": "", "TOKENSWIFT_CACHE": str(work / "cache")}
    said = run(command, "--version", **alone)
    if "built in" not in said:
        sys.exit(f"error: {made.name} does not use its kernels: {said}")
    run(
        command,
        "generate",
        "--continue",
        "The lamp",
        "--max-new-tokens",
        "20",
        "--ignore-eos",
        **alone,
    )
    run(command, "audit", "The lamp", "--max-new-tokens", "8", **alone)
    if list((work / "cache").glob("kernels/*.so")):
        sys.exit(f"error: {made.name} compiled kernels")
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the sdist and wheels, and try them.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--platforms", nargs="+", choices=list(kernels.PLATFORMS), default=list(kernels.PLATFORMS)
    )
    given = parser.parse_args()
    check_compilers(given.platforms)
    given.out.mkdir(exist_ok=True)
    source = sdist(given.out)
    print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB", flush=True)
    for platform in given.platforms:
        try:
            made = wheel(source, platform, given.out)
        except kernels.BuildError as error:
            sys.exit(f"error: {platform}: {error}")
        print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB", flush=True)
        if HERE[platform] == (sys.platform, library.architecture()):
            with tempfile.TemporaryDirectory() as work:
                print(f"tried: {tried(made, Path(work))}", flush=True)
        else:
            print("built, not run: another platform", flush=True)


if __name__ == "__main__":
    main()
