"""The compiled CPU kernels of this machine: those that the wheel carries, or compiled here once.

A wheel has a library for each instruction set of its platform (`tools/kernels.py`), whose name says
the set and what it is made from. A library that is compiled here lies in a folder of the user's
cache under a name made from the sources, the flags and the processor. The folder holds code that is
run: it is the user's alone, or it is not used.

Importing this takes the standard library alone: wheels are built with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tokenswift.cgroups import cpu_quota
from tokenswift.kernels.cpu.compilers import run_all
from tokenswift.types import OnProgress

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"
#: the library is the first one with all that it includes; compiled in parts, the second is
#: products with one number format, a part each
SOURCES = ("cpu.c", "cpu_format.c", *sorted(path.name for path in HERE.glob("cpu_*.h")))
#: no contraction: what is rounded once is written as such (`fused` in cpu_tile.h), whatever the
#: tuning
FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-pthread", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
COMPILERS = ("cc", "gcc", "clang")
#: the first set that the compiler takes is used
TARGETS = (("-march=native",), ("-march=native", "-mno-avx512bf16"), ("-mcpu=native",), ())
NATIVE = "native"  # asks for kernels that are compiled here, tuned for the processor at hand
DIGEST_BYTES = 32  # of the SHA-256 of a library that was compiled here, at its end

logger = logging.getLogger("tokenswift")


class InstructionSet(NamedTuple):
    """Flags of GCC and clang, and what a processor that has the set calls its abilities, as Linux
    does."""

    flags: tuple[str, ...]
    needs: str


_V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
#: by architecture, from the plainest to the best: the last one that a processor has is taken
SETS: dict[str, dict[str, InstructionSet]] = {
    "x86_64": {
        "avx2": InstructionSet(("-march=x86-64-v3",), "avx2 fma f16c bmi2"),
        "avx2-vnni": InstructionSet(
            ("-march=x86-64-v3", "-mavxvnni"), "avx2 fma f16c bmi2 avx_vnni"
        ),
        "avx512-vnni": InstructionSet(("-march=x86-64-v4", "-mavx512vnni"), f"{_V4} avx512_vnni"),
        "avx512-bf16": InstructionSet(
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), f"{_V4} avx512_vnni avx512_bf16"
        ),
    },
    "arm64": {
        "neon": InstructionSet(("-march=armv8-a",), ""),
        "neon-dotprod": InstructionSet(("-march=armv8.2-a+dotprod",), "asimddp"),
    },
}


# ---- the machine ---------------------------------------------------------------------------------


def architecture() -> str:
    """Of this machine: a key of :data:`SETS`, or another name."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)


def instruction_sets() -> dict[str, InstructionSet]:
    """The instruction sets of this machine's architecture."""
    return SETS.get(architecture(), {})


def fitting(abilities: str) -> list[str]:
    """Names of the sets that a processor with these abilities runs, the best one last."""
    able = set(abilities.split())
    return [
        name for name, each in instruction_sets().items() if able.issuperset(each.needs.split())
    ]


def processor() -> str:
    """The processor and its abilities, as far as the system tells: a library is never used on
    another one."""
    if sys.platform == "darwin":
        able = ["asimddp"] if _sysctl("hw.optional.arm.FEAT_DotProd") else []
        return " ".join([platform.machine(), platform.platform(), *able])
    # emulators answer for what they emulate, unlike /proc: bit 20 of AT_HWCAP is asimddp
    able = []
    if platform.machine() == "aarch64":
        abilities = ctypes.CDLL(None).getauxval(ctypes.c_ulong(16))
        if abilities >> 20 & 1:
            able = ["asimddp"]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        first_processor = text.split("\n\n", 1)[0].splitlines()
        keys = ("vendor_id", "model", "flags", "Features", "CPU ")
        lines = [line for line in first_processor if line.startswith(keys) and "MHz" not in line]
        return "\n".join([*lines, *able])
    except OSError:
        return " ".join([platform.machine(), platform.processor(), platform.platform(), *able])


def _sysctl(name: str) -> int:
    """A number that a Mac's kernel reports under a name; 0 where it has none."""
    value = ctypes.c_int32(0)
    size = ctypes.c_size_t(4)
    status = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return 0 if status else value.value


def usable_processors() -> int:
    """Processors that this process may use: by its affinity, and by its control groups' quota,
    rounded down, but at least 1. On a Mac those of its fast kind, as a stage of a pass takes as
    long as its slowest thread."""
    if sys.platform == "darwin":
        return max(0, _sysctl("hw.perflevel0.physicalcpu")) or os.cpu_count() or 1
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # no such call on this system
        count = os.cpu_count() or 1
    return max(1, int(min(count, cpu_quota())))


# ---- which kernels -------------------------------------------------------------------------------


def kernels_wanted() -> str:
    """``TOKENSWIFT_KERNELS``: "auto", "torch", "native" (compiled here), or the instruction set of
    the CPU kernels, to find out what is at fault.

    Raises:
        InputError: another value, or a set that the processor does not have.
    """
    from tokenswift.checks import check_choice

    wanted = os.environ.get("TOKENSWIFT_KERNELS") or "auto"
    check_choice("TOKENSWIFT_KERNELS", wanted, ("auto", "torch", NATIVE, *fitting(processor())))
    return wanted


def describe() -> str:
    """Which CPU kernels are used: "avx2 (built in)".

    Raises:
        InputError: see :func:`kernels_wanted`.
    """
    wanted = kernels_wanted()
    if wanted == "torch":
        return "torch"
    built_in = carried(wanted)
    if built_in is None:
        return "compiled at first use"
    instruction_set = Path(built_in._name).stem.rpartition("-")[0]
    return f"{instruction_set} (built in)"


def library(folder: Path, on_progress: OnProgress | None = None) -> ctypes.CDLL | str:
    """The kernels of this machine, carried or compiled; or why there are none.

    Args:
        folder: where compiled libraries are kept.
        on_progress: of :func:`compiled`.
    Raises:
        InputError: see :func:`kernels_wanted`.
    """
    wanted = kernels_wanted()
    built_in = carried(wanted)
    if built_in is not None:
        return built_in
    sets = instruction_sets()
    targets = (sets[wanted].flags,) if wanted in sets else TARGETS
    return compiled(folder, targets, on_progress)


# ---- kernels that the package carries ------------------------------------------------------------


def carried_name(name: str) -> str:
    """The file of an instruction set in a wheel, by what it is made from and the package's
    version."""
    version = (HERE.parent.parent / "version.py").read_text(encoding="utf-8")
    ingredients = "\0".join([repr(FLAGS), repr(SETS), version, *_sources()])
    return f"{name}-{hashlib.sha256(ingredients.encode()).hexdigest()[:20]}.so"


def carried(wanted: str) -> ctypes.CDLL | None:
    """The library that the package carries for the best instruction set of the processor, or the
    wanted one; None where it carries none that fits, with a line of the logger where it has others.

    Args:
        wanted: a value of ``TOKENSWIFT_KERNELS``.
    """
    if wanted == NATIVE or not BUILT.is_dir():
        return None
    names = [wanted] if wanted in instruction_sets() else fitting(processor())[::-1]
    for name in names:
        kernels = _load(BUILT / carried_name(name))
        if kernels is not None:
            return kernels
    logger.warning(
        "the CPU kernels that came with tokenswift are not used: they are of other sources or "
        "processors"
    )
    return None


# ---- kernels that are compiled here --------------------------------------------------------------


def compiled(
    folder: Path,
    targets: tuple[tuple[str, ...], ...] = TARGETS,
    on_progress: OnProgress | None = None,
) -> ctypes.CDLL | str:
    """The compiled kernels, from ``folder`` or compiled now; or why there are none.

    Args:
        folder: where compiled libraries are kept; created when it is not there.
        targets: sets of further flags, tried in turn.
        on_progress: called with the stage "compile" and parts of the library.
    """
    ingredients = "\n".join([*_sources(), *FLAGS, repr(targets), processor()])
    name = f"kernels-{hashlib.sha256(ingredients.encode()).hexdigest()[:20]}.so"
    cache = _private(folder)
    if cache is not None and _is_intact(cache / name):
        cached = _load(cache / name)
        if cached is not None:
            return cached
    compiler = _compiler()
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang)"
    logger.info("compiling the CPU kernels (once, up to a minute) into %s", folder)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenswift-", dir=cache) as workplace:
            path = Path(workplace) / name
            reason = _compile(compiler, path, targets, on_progress)
            if reason is not None:
                return reason
            _add_digest(path)
            if cache is not None:  # in one step; elsewhere this process alone has the library
                path = path.replace(cache / name)
            return _load(path) or "the compiled library cannot be loaded"
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())[:200]


def _compiler() -> str | None:
    """The first C compiler on the path."""
    paths = (shutil.which(name) for name in COMPILERS)
    return next((path for path in paths if path), None)


def _sources() -> list[str]:
    return [(HERE / name).read_text(encoding="utf-8") for name in SOURCES]


def _private(folder: Path) -> Path | None:
    """The folder, created if need be; None where it cannot be written, or somebody else may write
    into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = os.stat(folder)
    except OSError as error:
        logger.info("compiled kernels are not cached: %s", error.strerror or error)
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        logger.warning(
            "compiled kernels are not cached: others may change what is in %s "
            "(chmod go-w it, or name another cache folder by TOKENSWIFT_CACHE)",
            folder,
        )
        return None
    return folder if os.access(folder, os.W_OK) else None


def _compile(
    compiler: str,
    out: Path,
    targets: tuple[tuple[str, ...], ...],
    on_progress: OnProgress | None = None,
) -> str | None:
    """Compile the library with the first target that the compiler takes.

    Returns:
        Why there is no library; None when there is.
    """
    for name, text in zip(SOURCES, _sources(), strict=True):
        (out.parent / name).write_text(text, encoding="utf-8")
    parts = _parts()
    objects = [f"part{number}.o" for number in range(len(parts))]
    reason: str | None = ""
    for target in targets:
        flags = [*FLAGS, *target]
        build = re.sub(r'[\\"]', "", " ".join([Path(compiler).name, *flags]))
        how = [compiler, *flags, f'-DTS_BUILD="{build}"', "-c"]
        commands = [[*how, *part, "-o", file] for part, file in zip(parts, objects, strict=True)]
        reason = run_all(commands, out.parent, usable_processors(), on_progress)
        if reason is None:
            link = [compiler, *flags, "-shared", *objects, "-o", out.name, "-lm"]
            reason = run_all([link], out.parent, processors=1)
        if reason is None:
            return None
    return reason or f"{compiler} ended with an error"


def _parts() -> list[list[str]]:
    """What each part of the library is compiled from, the one that takes longest first."""
    first, *others = (name for name in SOURCES if name.endswith(".c"))
    if not others:
        return [[first]]
    formats = re.findall(r"\bX\((\w+), \d+\)", (HERE / "cpu_low.h").read_text(encoding="utf-8"))
    return [
        ["-DTS_PARTS", first],
        *(["-DTS_PARTS", f"-DTS_FORMAT={name}", others[0]] for name in formats),
    ]


def _add_digest(path: Path) -> None:
    """Add a digest to the end of a library, which says later that it is complete."""
    data = path.read_bytes()
    path.write_bytes(data + hashlib.sha256(data).digest())


def _is_intact(path: Path) -> bool:
    """Whether there is a library with its digest: loading one that is cut ends the process."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    digest = hashlib.sha256(data[:-DIGEST_BYTES]).digest()
    return len(data) > DIGEST_BYTES and data[-DIGEST_BYTES:] == digest


def _load(path: Path) -> ctypes.CDLL | None:
    """A library, where there is one that can be loaded."""
    try:
        return ctypes.CDLL(str(path)) if path.is_file() else None
    except OSError:
        return None
