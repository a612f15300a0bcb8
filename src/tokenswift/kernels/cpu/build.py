"""Loads the CPU kernels: those that the wheel carries (`prebuilt.py`), or compiled once per machine.

A library that is compiled here lies in a folder of the user's cache under a name made from the sources, the
flags, the processor and the compiler; it ends with the SHA-256 of what stands before, so that a library and
its checksum are one file. The folder holds code that is run: it is the user's alone, or it is not used.
Whatever goes wrong (no compiler, a folder that cannot be written, a broken file) ends in None and one line of
the logger ``tokenswift``; the callers then run the torch path to the same specification.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

from tokenswift.checks import check_choice
from tokenswift.kernels.cpu.prebuilt import BUILT, FLAGS, SOURCES, Carried, fitting, load, own_sets

COMPILERS = ("cc", "gcc", "clang")
#: the first set that the compiler takes is used
TARGETS = (("-march=native",), ("-march=native", "-mno-avx512bf16"), ("-mcpu=native",), ())
#: sets of this architecture that may be asked for by name
INSTRUCTION_SETS = own_sets()
NATIVE = "native"  # asks for kernels that are compiled here, tuned for the processor at hand
#: abilities of arm64: which of Linux' words (AT_HWCAP, AT_HWCAP2) has which bit for them
ARM_ABILITIES = {"asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}
TIMEOUT = 600  # seconds for one compilation; the machine may be busy
_DIGEST = hashlib.sha256().digest_size

logger = logging.getLogger("tokenswift")


def library(
    folder: Path, targets: tuple[tuple[str, ...], ...] = TARGETS, compiler: str | None = None
) -> ctypes.CDLL | None:
    """The compiled kernels, from ``folder`` or made now; None where they cannot be had.

    Args:
        folder: where compiled libraries are kept; made when it is not there.
        targets: sets of further flags, tried in turn.
        compiler: a command; by default the first of :data:`COMPILERS` that is there.
    """
    sources = "\n".join([*_sources(), *FLAGS, repr(targets), processor()])
    name = f"kernels-{hashlib.sha256(sources.encode()).hexdigest()[:20]}-"
    program = next((found for each in COMPILERS if (found := shutil.which(compiler or each))), None)
    kept = _private(folder)
    if kept is not None:
        # without a compiler, what one made before it was taken away serves
        there = (
            [name + _identity(program) + ".so"]
            if program
            else sorted(p.name for p in kept.glob(name + "*.so"))
        )
        for known in there:
            if (loaded := _load(kept / known)) is not None:
                return loaded
    if program is None:
        return _without(f"there is no C compiler ({compiler or 'cc, gcc or clang'})")
    logger.info("compiling the CPU kernels (once, a few seconds) into %s", folder)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenswift-") as made:
            built = _compile(program, Path(made), targets)
            if isinstance(built, str):
                return _without(built)
            _seal(built)
            path = built if kept is None else _keep(built, kept / (name + _identity(program) + ".so"))
            return _load(path) or _without("the compiled library cannot be loaded")
    except (OSError, subprocess.SubprocessError) as error:
        return _without(" ".join(str(error).split())[:200])


def carried(wanted: str) -> Carried | None:
    """The entries of the library that the package carries, for the best instruction set of the processor;
    None where it carries none that fits, with a line of the logger where it should have.

    Args:
        wanted: a value of ``TOKENSWIFT_KERNELS``.
    """
    if wanted == NATIVE:
        return None
    found = load(wanted if wanted in INSTRUCTION_SETS else "auto", processor(), BUILT)
    if isinstance(found, str):
        logger.warning("the CPU kernels that came with tokenswift are not used (%s)", found)
        return None
    return found


def kernels_wanted() -> str:
    """``TOKENSWIFT_KERNELS``: "auto", "torch", "native" (compiled here), or the instruction set of the
    CPU kernels, to find out what is at fault.

    Raises:
        InputError: another value.
    """
    wanted = os.environ.get("TOKENSWIFT_KERNELS") or "auto"
    check_choice("TOKENSWIFT_KERNELS", wanted, ("auto", "torch", NATIVE, *INSTRUCTION_SETS))
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
    if asked and wanted != NATIVE and targets_of(wanted) is None:
        return f"none ({asked}, which this processor does not have)"
    found = None if wanted == NATIVE else load(wanted if asked else "auto", processor(), BUILT)
    if isinstance(found, Carried):
        return f"{found.instructions} (built in, {asked or 'the best of this processor'})"
    if not any(map(shutil.which, COMPILERS)):
        why = f"no C compiler, and those that came with it: {found}" if found else "no C compiler"
        return f"those compiled earlier, or torch ({asked or why})"
    why = asked or (f"those that came with it: {found}" if found else "for this processor")
    return f"{wanted if asked else NATIVE} (compiled at first use, {why})"


def targets_of(instructions: str) -> tuple[tuple[str, ...], ...] | None:
    """Flags for an instruction set of this architecture; None where this processor does not have it."""
    if instructions not in fitting(processor()):
        return None
    return (INSTRUCTION_SETS[instructions].flags,)


#: abilities, as Linux names them, by what a Mac's kernel calls them
MAC_ABILITIES = {
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
}


def _mac_says(name: str) -> bool:
    """Whether a Mac's kernel says that there is something."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    asked = ctypes.CDLL(None).sysctlbyname
    return asked(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value == 1


def processor() -> str:
    """The processor and its abilities, as far as the system tells: a library is never used on another one."""
    if sys.platform == "darwin":
        able = [ability for name, ability in MAC_ABILITIES.items() if _mac_says(name)]
        return " ".join([platform.machine(), platform.platform(), *able])
    able = _arm_abilities() if platform.machine() == "aarch64" else []
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        wanted = ("vendor_id", "model", "flags", "Features", "CPU ")
        told = [line for line in lines.splitlines() if line.startswith(wanted) and "MHz" not in line]
        return "\n".join([*told, *able])
    except OSError:
        return " ".join([platform.machine(), platform.processor(), platform.platform(), *able])


def _arm_abilities() -> list[str]:
    """What Linux on arm64 tells each process of the processor; emulators answer for what they emulate."""
    ask = ctypes.CDLL(None).getauxval
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    return [name for name, (kind, bit) in ARM_ABILITIES.items() if ask(kind) >> bit & 1]


def _sources() -> list[str]:
    folder = resources.files("tokenswift").joinpath("kernels", "cpu")
    return [folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES]


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
        command = [
            compiler,
            *flags,
            f'-DTS_BUILD="{about}"',
            "-shared",
            SOURCES[0],
            "-o",
            "kernels.so",
            "-lm",
        ]
        ran = subprocess.run(command, cwd=folder, capture_output=True, timeout=TIMEOUT, check=False)
        if not ran.returncode:
            return folder / "kernels.so"
        text = ran.stderr.decode(errors="replace").strip()
        reason = text.splitlines()[0][:200] if text else f"{compiler} ended with {ran.returncode}"
    return reason


def _seal(library: Path) -> None:
    """Add a library's checksum behind it, where no loader looks."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)


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


def _without(reason: str) -> None:
    logger.warning("CPU kernels are not available (%s); the slower torch path is used", reason)
