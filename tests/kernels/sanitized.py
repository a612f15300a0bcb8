"""The CPU kernels compiled with ASan and UBSan, and programs that run with them.

``python -m tests.kernels.sanitized LIBRARY MODULE ARGUMENTS``, with ASan preloaded, runs a module
as a program in which tokenswift takes that library for its kernels.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenswift.kernels.cpu import library as built

FLAGS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


def runtime() -> str | None:
    """What is to be preloaded: GCC's ASan, and libstdc++, without which ASan ends a process in
    which torch throws an exception. None where GCC has no ASan."""
    if shutil.which("gcc") is None:
        return None
    paths: list[str] = []
    for name in ("libasan.so", "libstdc++.so"):
        words = ["gcc", f"-print-file-name={name}"]
        result = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        path = result.stdout.strip()
        if os.path.isabs(path) and os.path.exists(path):
            paths.append(path)
    return " ".join(paths) if paths and "libasan" in paths[0] else None


def compiled(target: Sequence[str], library: Path) -> Path:
    """The kernels for a target (flags of the compiler), with sanitizers. This process cannot load
    them."""
    words = [*built.FLAGS, *target, *FLAGS, "-shared", built.SOURCES[0], "-o", str(library), "-lm"]
    result = subprocess.run(
        ["gcc", *words], cwd=built.HERE, capture_output=True, text=True, timeout=1200, check=False
    )
    assert result.returncode == 0, result.stderr
    return library


def command(library: Path, module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of `subprocess` that run a module as a program with these kernels. A fault that
    the sanitizers find ends it."""
    variables = {
        "LD_PRELOAD": runtime() or "",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "TOKENSWIFT_SHAPES": "0",
    }
    return {
        "args": [
            sys.executable,
            "-m",
            "tests.kernels.sanitized",
            str(library),
            module,
            *arguments,
        ],
        "cwd": Path(__file__).parents[2],
        "env": os.environ | variables,
        "text": True,
    }


def main(path: str, module: str, arguments: list[str]) -> None:
    """What ``-m tests.kernels.sanitized`` does."""
    os.environ.pop("LD_PRELOAD", None)  # for this process alone
    kernels = ctypes.CDLL(path)
    built.compiled = lambda *args, **kwargs: kernels  # type: ignore[assignment]  # of whoever asks from now on
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
