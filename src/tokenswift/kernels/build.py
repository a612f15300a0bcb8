"""Compiles the CPU kernels once per machine and loads them.

The library lies in a folder of the user's cache under a name made from the sources, the compiler's flags and
the processor, beside a file with its SHA-256. Whatever goes wrong (no compiler, a folder that cannot be
written, a broken file) ends in None and one line of the logger ``tokenswift``; the callers then run the torch
path to the same specification.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import torch

SOURCES = ("cpu.c", "cpu_attention.h", "cpu_tile.h", "cpu_choose.h")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-w")
#: the first set that the compiler takes is used
TARGETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",))
TIMEOUT = 120  # seconds for one compilation

logger = logging.getLogger("tokenswift")


def library(folder: Path, targets: tuple[tuple[str, ...], ...] = TARGETS) -> ctypes.CDLL | None:
    """The compiled kernels, from ``folder`` or made now; None where they cannot be had.

    Args:
        folder: where compiled libraries are kept; made when it is not there.
        targets: sets of further flags, tried in turn.
    """
    key = hashlib.sha256("\n".join([*_sources(), *FLAGS, repr(targets), processor(), _openmp()]).encode())
    path = folder / f"kernels-{key.hexdigest()[:20]}.so"
    loaded = _load(path)
    if loaded is not None:
        return loaded
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return _without("there is no C compiler (cc, gcc or clang)")
    logger.info("compiling the CPU kernels (once, about two seconds) into %s", folder)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenswift-") as made:
            built = _compile(compiler, Path(made), targets)
            if isinstance(built, str):
                return _without(built)
            return _load(_keep(built, path)) or _without("the compiled library cannot be loaded")
    except (OSError, subprocess.SubprocessError) as error:
        return _without(" ".join(str(error).split())[:200])


def processor() -> str:
    """The processor and its abilities, as far as the system tells: a library is never used on another one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        wanted = ("vendor_id", "model", "flags", "Features", "CPU ")
        return "\n".join(line for line in lines.splitlines() if line.startswith(wanted) and "MHz" not in line)
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"


def _sources() -> list[str]:
    folder = resources.files("tokenswift").joinpath("kernels")
    return [folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES]


def _openmp() -> str:
    """torch's own OpenMP runtime, so that both share one set of threads; "" where torch brings none."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*")) + sorted(
        Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*")
    )
    return str(found[0]) if found else ""


def _compile(compiler: str, folder: Path, targets: tuple[tuple[str, ...], ...]) -> Path | str:
    """The library, made in ``folder``, or why there is none."""
    for name, text in zip(SOURCES, _sources(), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    reason = ""
    for target in targets:
        steps = [
            [compiler, *FLAGS, *target, "-c", SOURCES[0], "-o", "kernels.o"],
            [
                compiler,
                "-shared",
                "kernels.o",
                "-o",
                "kernels.so",
                *([_openmp()] if _openmp() else target),
                "-lm",
            ],
        ]
        for step in steps:
            ran = subprocess.run(step, cwd=folder, capture_output=True, timeout=TIMEOUT, check=False)
            if ran.returncode:
                text = ran.stderr.decode(errors="replace").strip()
                reason = text.splitlines()[0][:200] if text else f"{compiler} ended with {ran.returncode}"
                break
        else:
            return folder / "kernels.so"
    return reason


def _keep(built: Path, path: Path) -> Path:
    """Move a library and its checksum to their place; where that fails it serves this process alone."""
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kernels-") as near:
            library, check = Path(near) / "library", Path(near) / "check"
            shutil.copyfile(built, library)
            check.write_text(digest, encoding="ascii")
            os.replace(library, path)
            os.replace(check, _checksum(path))
        return path
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error.strerror or error)
        _checksum(built).write_text(digest, encoding="ascii")
        return built


def _checksum(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        if (
            hashlib.sha256(path.read_bytes()).hexdigest()
            != _checksum(path).read_text(encoding="ascii").strip()
        ):
            return None
        return ctypes.CDLL(str(path))
    except (OSError, ValueError):
        return None


def _without(reason: str) -> None:
    logger.warning("CPU kernels are not available (%s); the slower torch path is used", reason)
