"""Wheels of a platform.

With ``TOKENSWIFT_WHEEL=linux-x86_64`` the CPU kernels are compiled into the wheel.
``TOKENSWIFT_WHEEL_KERNELS=FOLDER`` takes those that `tools/kernels.py` has put into a folder.
Without the former the wheel is for any platform, and kernels are compiled at first use. See
`make wheels`.
"""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
WANTED = os.environ.get("TOKENSWIFT_WHEEL", "")
MADE = os.environ.get("TOKENSWIFT_WHEEL_KERNELS", "")
KERNELS = runpy.run_path(str(HERE / "tools/kernels.py"))
if WANTED and WANTED not in KERNELS["PLATFORMS"]:
    raise SystemExit(f"TOKENSWIFT_WHEEL is {WANTED!r}; valid: {', '.join(KERNELS['PLATFORMS'])}")


class BuildWithKernels(build_py):
    """Python files, and the library of kernels beside its sources."""

    def run(self) -> None:
        super().run()
        if WANTED and not self.editable_mode:
            out = Path(self.build_lib) / "tokenswift/kernels/cpu/built"
            try:
                if MADE:
                    shutil.copytree(MADE, out, dirs_exist_ok=True)
                else:
                    KERNELS["make"](WANTED, out)
            except KERNELS["BuildError"] as error:
                raise SystemExit(f"error: {error}") from error


class WithLibrary(Distribution):
    """Has code of a platform, and is installed as such."""

    def has_ext_modules(self) -> bool:
        return bool(WANTED) or super().has_ext_modules()


class PlatformWheel(bdist_wheel):
    """For any Python 3: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", KERNELS["PLATFORMS"][WANTED].tag) if WANTED else super().get_tag()


setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
