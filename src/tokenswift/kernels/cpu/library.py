"""The compiled CPU kernels of this machine: those that the wheel carries, or compiled here once.

A wheel has one library with each instruction set of its platform, whose entries end with the set's name;
``kernels.json`` beside it says which sets there are, what compiled them, the library's SHA-256, and the hash
of the sources (`scripts/kernels.py` makes both). A library of other sources, or a damaged one, is not used.

A library that is compiled here lies in a folder of the user's cache under a name made from the sources, the
flags, the processor and the compiler; it ends with the SHA-256 of what stands before, so that a library and
its checksum are one file. The folder holds code that is run: it is the user's alone, or it is not used.

Importing this takes the standard library alone: wheels are built with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"
LIBRARY, ABOUT = "kernels.so", "kernels.json"
SOURCES = ("cpu.c", *sorted(path.name for path in HERE.glob("cpu_*.h")))
#: no contraction: what is rounded once is written as such (`fused` in cpu_tile.h), whatever the tuning
FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-pthread", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
COMPILERS = ("cc", "gcc", "clang")
#: the first set that the compiler takes is used
TARGETS = (("-march=native",), ("-march=native", "-mno-avx512bf16"), ("-mcpu=native",), ())
NATIVE = "native"  # asks for kernels that are compiled here, tuned for the processor at hand
TIMEOUT = 600  # seconds for one compilation; the machine may be busy
MOST_ABOUT = 1 << 16  # bytes of kernels.json
#: abilities of arm64: which of Linux' words (AT_HWCAP, AT_HWCAP2) has which bit, and what a Mac calls them
ARM_ABILITIES = {"asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}
MAC_ABILITIES = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}
_DIGEST = hashlib.sha256().digest_size

logger = logging.getLogger("tokenswift")


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


# ---- the machine -------------------------------------------------------------------------------------------


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


def processor() -> str:
    """The processor and its abilities, as far as the system tells: a library is never used on another one."""
    if sys.platform == "darwin":
        able = [ability for ability, name in MAC_ABILITIES.items() if _mac_says(f"hw.optional.arm.{name}")]
        return " ".join([platform.machine(), platform.platform(), *able])
    able = _arm_abilities() if platform.machine() == "aarch64" else []
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        wanted = ("vendor_id", "model", "flags", "Features", "CPU ")
        told = [line for line in lines.splitlines() if line.startswith(wanted) and "MHz" not in line]
        return "\n".join([*told, *able])
    except OSError:
        return " ".join([platform.machine(), platform.processor(), platform.platform(), *able])


def _mac_says(name: str) -> int:
    """A number that a Mac's kernel tells of itself; 0 where it does not."""
    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value


def _arm_abilities() -> list[str]:
    """What Linux on arm64 tells each process of the processor; emulators answer for what they emulate."""
    ask = ctypes.CDLL(None).getauxval
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    return [name for name, (kind, bit) in ARM_ABILITIES.items() if ask(kind) >> bit & 1]


def usable() -> int:
    """Processors that this process may use: its affinity and its control group's quota, at least 1; on a Mac
    those of its fast kind, as a stage of a pass takes as long as its slowest thread."""
    if sys.platform == "darwin":
        return max(0, _mac_says("hw.perflevel0.physicalcpu")) or os.cpu_count() or 1
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # no such call on this system
        count = os.cpu_count() or 1
    return max(1, math.ceil(min(count, quota())))


def quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Processors' worth of time that the control group allows; infinity where nothing is set.

    Args:
        root, own: where the system tells it (cgroup versions 2 and 1).
    """
    try:
        groups = [line.split(":", 2)[2] for line in own.read_text(encoding="ascii").splitlines()]
    except (OSError, IndexError, UnicodeDecodeError):
        groups = []
    found = [math.inf]
    for group in {"/", *groups}:
        path = Path(group.strip("/"))
        for each in (path, *path.parents):  # a limit of a group above holds as well
            found += [_limit(root / each), _limit(root / "cpu" / each)]
    return min(found)


def _limit(folder: Path) -> float:
    """Of one control group."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            told = " ".join((folder / name).read_text(encoding="ascii") for name in names)
            allowed, period = map(int, told.split())
            if allowed > 0:
                return allowed / period
        except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
            continue
    return math.inf


# ---- which kernels -----------------------------------------------------------------------------------------


def kernels_wanted() -> str:
    """``TOKENSWIFT_KERNELS``: "auto", "torch", "native" (compiled here), or the instruction set of the
    CPU kernels, to find out what is at fault.

    Raises:
        InputError: another value.
    """
    from tokenswift.checks import check_choice

    wanted = os.environ.get("TOKENSWIFT_KERNELS") or "auto"
    check_choice("TOKENSWIFT_KERNELS", wanted, ("auto", "torch", NATIVE, *own_sets()))
    return wanted


def describe() -> str:
    """Which CPU kernels are used, and why: "avx2 (built in, the best of this processor)".

    Raises:
        InputError: see :func:`kernels_wanted`.
    """
    wanted = kernels_wanted()
    asked = "" if wanted == "auto" else f"TOKENSWIFT_KERNELS={wanted}"
    if wanted == "torch":
        return f"torch ({asked})"
    if wanted in own_sets() and wanted not in fitting(processor()):
        return f"none ({asked}, which this processor does not have)"
    found = _carried(wanted)
    if isinstance(found, Carried):
        return f"{found.instructions} (built in, {asked or 'the best of this processor'})"
    if not any(map(shutil.which, COMPILERS)):
        why = f"no C compiler, and those that came with it: {found}" if found else "no C compiler"
        return f"those compiled earlier, or torch ({asked or why})"
    why = asked or (f"those that came with it: {found}" if found else "for this processor")
    return f"{wanted if asked else NATIVE} (compiled at first use, {why})"


def library(folder: Path) -> ctypes.CDLL | str:
    """The kernels of this machine, carried or compiled; or why there are none.

    Args:
        folder: where compiled libraries are kept.
    Raises:
        InputError: the processor does not have the instruction set that is asked for.
    """
    wanted = kernels_wanted()
    if wanted in own_sets() and wanted not in fitting(processor()):
        from tokenswift.types import InputError

        raise InputError(f"TOKENSWIFT_KERNELS is {wanted!r}, which this processor does not have; valid: auto")
    targets = (own_sets()[wanted].flags,) if wanted in own_sets() else TARGETS
    return carried(wanted) or compiled(folder, targets)


# ---- kernels that the package carries ----------------------------------------------------------------------


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


def suffix(name: str) -> str:
    """What the entries of an instruction set end with."""
    return "__" + name.replace("-", "_")


def text_of(library: ctypes.CDLL, name: str) -> str:
    """The value of an array of characters of a library."""
    if isinstance(library, Carried):
        name += suffix(library.instructions)
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, name))).decode()


def key_of(library: ctypes.CDLL) -> str | None:
    """What stands for a library's code on this processor; None where it is kept nowhere."""
    name = library.key if isinstance(library, Carried) else Path(library._name).stem
    return name if name.startswith("kernels-") else None


def stamp() -> str:
    """A hash of what a library is made from, and of the package's version."""
    version = (HERE.parent.parent / "version.py").read_text(encoding="utf-8")
    return hashlib.sha256("\0".join([repr(FLAGS), repr(SETS), version, *_sources()]).encode()).hexdigest()


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


def _carried(wanted: str) -> Carried | str | None:
    """The entries of the library that the package carries, for the best instruction set of the processor or
    the one that is wanted; why they cannot be had; None where it carries none that fits."""
    found = None if wanted == NATIVE else about(BUILT)
    if found is None or isinstance(found, str):
        return found
    able = processor()
    name = choice(wanted, able, list(found))
    if name is None:
        return None
    key = hashlib.sha256(f"{stamp()} {name} {able}".encode()).hexdigest()[:20]
    try:
        made = Carried(BUILT / LIBRARY, name, f"kernels-{key}-{name}")
        text_of(made, "ts_build")
    except (OSError, ValueError, AttributeError) as error:  # of another platform, or without the entries
        return " ".join(str(error).split())[:200]
    return made


def carried(wanted: str) -> Carried | None:
    """The entries that the package carries; None where there are none, with a line of the logger where there
    should be.

    Args:
        wanted: a value of ``TOKENSWIFT_KERNELS``.
    """
    found = _carried(wanted)
    if isinstance(found, str):
        logger.warning("the CPU kernels that came with tokenswift are not used (%s)", found)
        return None
    return found


# ---- kernels that are compiled here ------------------------------------------------------------------------


def compiled(
    folder: Path, targets: tuple[tuple[str, ...], ...] = TARGETS, compiler: str | None = None
) -> ctypes.CDLL | str:
    """The compiled kernels, from ``folder`` or made now; or why they cannot be had.

    Args:
        folder: where compiled libraries are kept; made when it is not there.
        targets: sets of further flags, tried in turn.
        compiler: a command; by default the first of :data:`COMPILERS` that is there.
    """
    sources = "\n".join([*_sources(), *FLAGS, repr(targets), processor()])
    name = f"kernels-{hashlib.sha256(sources.encode()).hexdigest()[:20]}-"
    program = next((found for each in COMPILERS if (found := shutil.which(compiler or each))), None)
    own = f"{name}{_identity(program)}.so" if program else ""
    kept = _private(folder)
    if kept is not None:
        # without a compiler, what one made before it was taken away serves
        there = [own] if program else sorted(path.name for path in kept.glob(name + "*.so"))
        for known in there:
            if (loaded := _load(kept / known)) is not None:
                return loaded
    if program is None:
        return f"there is no C compiler ({compiler or 'cc, gcc or clang'})"
    logger.info("compiling the CPU kernels (once, a few seconds) into %s", folder)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenswift-") as made:
            built = _compile(program, Path(made), targets)
            if isinstance(built, str):
                return built
            digest = hashlib.sha256(built.read_bytes()).digest()
            with built.open("ab") as file:  # behind what a loader looks at
                file.write(digest)
            path = built if kept is None else _keep(built, kept / own)
            return _load(path) or "the compiled library cannot be loaded"
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())[:200]


def _sources() -> list[str]:
    return [(HERE / name).read_text(encoding="utf-8") for name in SOURCES]


def _identity(compiler: str) -> str:
    """A compiler, told from others and from its own other versions."""
    path = os.path.realpath(compiler)
    about = os.stat(path)
    return hashlib.sha256(f"{path} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:12]


def _private(folder: Path) -> Path | None:
    """The folder, made if need be, if nobody else may write into it; None if another user owns it or it
    cannot be had. One of ours that was open to others is closed, and what lies in it is not trusted."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = os.stat(folder)
        if about.st_uid != os.getuid():
            logger.warning(
                "compiled kernels are not cached: %s belongs to another user, who could change them "
                "(TOKENSWIFT_CACHE names another cache folder)",
                folder,
            )
            return None
        if about.st_mode & 0o022:
            logger.warning(
                "%s was writable by others: it is now private, and the kernels are recompiled", folder
            )
            os.chmod(folder, 0o700)
            for path in folder.glob("kernels-*"):
                path.unlink()
        return folder
    except OSError as error:
        logger.info("compiled kernels are not cached: %s", error.strerror or error)
        return None


def _compile(compiler: str, folder: Path, targets: tuple[tuple[str, ...], ...]) -> Path | str:
    """The library, made in ``folder``, or why there is none."""
    for name, text in zip(SOURCES, _sources(), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    reason = ""
    for target in targets:
        flags = [*FLAGS, *target]
        about = " ".join([Path(compiler).name, *flags]).replace("\\", "").replace('"', "")
        made = (f'-DTS_BUILD="{about}"', "-shared", SOURCES[0], "-o", LIBRARY, "-lm")
        command = [compiler, *flags, *made]
        ran = subprocess.run(command, cwd=folder, capture_output=True, timeout=TIMEOUT, check=False)
        if not ran.returncode:
            return folder / LIBRARY
        text = ran.stderr.decode(errors="replace").strip()
        reason = text.splitlines()[0][:200] if text else f"{compiler} ended with {ran.returncode}"
    return reason


def _keep(built: Path, path: Path) -> Path:
    """Move a library to its place in one step; where that fails it serves this process alone."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kernels-") as near:
            library = Path(near) / "library"
            shutil.copyfile(built, library)
            os.replace(library, path)
        return path
    except OSError as error:
        logger.info("compiled kernels are not cached: %s", error.strerror or error)
        return built


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
            return None
        return ctypes.CDLL(str(path))
    except OSError:
        return None
