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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.kernels.cpu import library
from tools import kernels

if TYPE_CHECKING:
    from macholib.MachO import MachO as MachOFile
    from macholib.MachO import MachOHeader

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


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """A command of a library for macOS.

    Attributes:
        command: its fields, an object of macholib.
        content: what follows them, such as a name.
    """

    command: Any
    content: bytes


def run(command: Sequence[str | Path], **environment: str) -> str:
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
        run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", work])
        return Path(shutil.copy(next(Path(work).glob("*.tar.gz")), out))


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
    folder = ROOT / "build" / "kernels" / platform
    if not built(platform):
        kernels.make(platform, folder)
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        run(
            [*pip, "--wheel-dir", work, source],
            TOKENSWIFT_WHEEL=platform,
            TOKENSWIFT_WHEEL_KERNELS=str(folder),
        )
        file = next(Path(work).glob("*.whl"))
        check_tag(file, kernels.PLATFORMS[platform].tag)
        file = Path(shutil.copy(file, out))
    if (size := file.stat().st_size) > MOST:
        sys.exit(f"error: {file.name} has {size:,} bytes; valid: at most {MOST:,}")
    check_kernels(file, platform)
    return file


def check_tag(file: Path, tag: str) -> None:
    """End the program where a wheel needs more than its tag says, or has another tag."""
    if tag.startswith("manylinux"):
        shown = run([sys.executable, "-m", "auditwheel", "show", file])
        least = re.search(r"manylinux_2_(\d+)_", shown)
        if least is None or int(least[1]) > int(tag.split("_")[2]):
            needs = least[0] if least else "a newer glibc, or other libraries"
            sys.exit(f"error: {file.name} needs {needs}")
    if not file.name.endswith(f"-py3-none-{tag}.whl"):
        sys.exit(f"error: the wheel is {file.name}; it should be for {tag}")


def check_kernels(file: Path, platform: str) -> None:
    """End the program where a wheel's kernels are not those of its sources, or unfit for a Mac."""
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(file) as archive:
        archive.extractall(work)
        libraries = sorted((Path(work) / "tokenswift/kernels/cpu/built").glob("*"))
        if {path.name for path in libraries} != set(kernels.names_of(platform)):
            sys.exit(f"error: {file.name}: its kernels are not those of its sources")
        for path in libraries if platform.startswith("macos") else ():
            if fault := fault_for_mac(path):
                sys.exit(f"error: {file.name}: {path.name}: {fault}")


def fault_for_mac(path: Path) -> str | None:
    """What a Mac would not load, or should not find, in a library for macOS; None: nothing.

    Read with macholib: processor, load commands and symbols.
    """
    from macholib import mach_o
    from macholib.MachO import MachO

    file = MachO(str(path))
    header = file.headers[0]
    processor = mach_o.CPU_TYPE_NAMES.get(int(header.header.cputype))
    is_library = int(header.header.filetype) == mach_o.MH_DYLIB
    if len(file.headers) > 1 or processor != "ARM64" or not is_library:
        return "it is no library for arm64 alone"
    return fault_of_commands(header) or fault_of_symbols(file, header)


def fault_of_commands(header: MachOHeader) -> str | None:
    """What is wrong with a library's signature, version, segments, name or links."""
    from macholib import mach_o

    commands: dict[int, list[LoadCommand]] = {}
    for load, command, content in header.commands:
        commands.setdefault(int(load.cmd), []).append(LoadCommand(command, content))

    def names(*kinds: int) -> list[str]:
        loads = [load for kind in kinds for load in commands.get(kind, ())]
        return [load.content.rstrip(b"\0").decode() for load in loads]

    if mach_o.LC_CODE_SIGNATURE not in commands:
        return "it is not signed, which Apple silicon asks of all code"
    versions = [load.command for load in commands.get(mach_o.LC_BUILD_VERSION, ())]
    least = [(int(version.platform), int(version.minos)) for version in versions]
    major = int(kernels.PLATFORMS["macos-arm64"].tag.split("_")[1])
    if least != [(mach_o.PLATFORM_MACOS, major << 16)]:
        return f"platform and least version are {least}; they should be macOS and {major}.0"
    segments = [load.command for load in commands[mach_o.LC_SEGMENT_64]]
    if any(segment.vmaddr % PAGE or segment.fileoff % PAGE for segment in segments):
        return f"a segment does not begin on a page of {PAGE:,} bytes"
    install_name = names(mach_o.LC_ID_DYLIB)
    if install_name != ["@rpath/kernels.so"]:
        return f"it calls itself {install_name[0]}"
    linked = names(
        mach_o.LC_LOAD_DYLIB,
        mach_o.LC_LOAD_WEAK_DYLIB,
        mach_o.LC_REEXPORT_DYLIB,
        mach_o.LC_RPATH,
    )
    if linked != ["/usr/lib/libSystem.B.dylib"]:
        links = ", ".join(linked) or "no library"
        return f"it asks for {links}; it should ask for the system's alone"
    return None


def fault_of_symbols(file: MachOFile, header: MachOHeader) -> str | None:
    """What is wrong with what a library exports and calls."""
    from macholib import mach_o
    from macholib.SymbolTable import SymbolTable

    external = [
        (name.decode(), symbol.n_sect)
        for symbol, name in SymbolTable(file, header).nlists
        if symbol.n_type & mach_o.N_EXT
    ]
    exported = {name for name, section in external if section} - ADDED
    entries = {f"_{entry}" for entry in kernels.entries()}
    if exported != entries:
        others = ", ".join(sorted(exported ^ entries)[:4])
        return f"it exports others than its entries: {others}"
    called = [name for name, section in external if not section]
    lacking = [name for name in called if any(word in name for word in LACKING)]
    if lacking:
        return f"it calls {lacking[0]}, which macOS does not have"
    return None


def tried(file: Path, work: Path) -> str:
    """What the installed command says of itself, after it has written and audited without a
    compiler."""
    run([sys.executable, "-m", "venv", work / "venv"])
    install = [work / "venv/bin/python", "-m", "pip", "install", "--quiet", "--constraint"]
    run([*install, ROOT / "constraints.txt", file], PYTHONPATH="")
    command = work / "venv/bin/tokenswift"
    # no compiler is in the environment's own folder, and nothing else is in reach
    environment = {
        "PATH": str(command.parent),
        "PYTHONPATH": "",
        "TOKENSWIFT_CACHE": str(work / "cache"),
    }
    version = run([command, "--version"], **environment)
    if "built in" not in version:
        sys.exit(f"error: {file.name} does not use its kernels: {version}")
    length = ["--max-new-tokens", "20", "--ignore-eos"]
    run([command, "generate", "--continue", "The lamp", *length], **environment)
    run([command, "audit", "The lamp", "--max-new-tokens", "8"], **environment)
    if list((work / "cache").glob("kernels/*.so")):
        sys.exit(f"error: {file.name} compiled kernels")
    return version.strip()


def main() -> None:
    """Build, and try what can run here."""
    parser = argparse.ArgumentParser(description="Build the sdist and wheels, and try them.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--platforms", nargs="+", choices=list(kernels.PLATFORMS), default=list(kernels.PLATFORMS)
    )
    options = parser.parse_args()
    check_compilers(options.platforms)
    options.out.mkdir(exist_ok=True)
    source = sdist(options.out)
    print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB", flush=True)
    for platform in options.platforms:
        try:
            file = wheel(source, platform, options.out)
        except kernels.BuildError as error:
            sys.exit(f"error: {platform}: {error}")
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
        if HERE[platform] == (sys.platform, library.architecture()):
            with tempfile.TemporaryDirectory() as work:
                print(f"tried: {tried(file, Path(work))}", flush=True)
        else:
            print("built, not run: another platform", flush=True)


if __name__ == "__main__":
    main()
