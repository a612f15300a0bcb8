"""What ``tokenswift --version`` shows, without importing torch (which takes seconds)."""

from __future__ import annotations

import ctypes
import platform
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from tokenswift.kernels.cpu.library import describe
from tokenswift.version import __version__


def text() -> str:
    """``tokenswift 0.1.0 (torch …, transformers …, Python …; device cpu: x86_64; CPU kernels: …)``.

    Raises:
        InputError: ``TOKENSWIFT_KERNELS`` names nothing that there is.
    """
    parts = [f"{name} {_version(name)}" for name in ("torch", "transformers")]
    about = f"{', '.join(parts)}, Python {platform.python_version()}; {_device()}; CPU kernels: {describe()}"
    return f"tokenswift {__version__} ({about})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _device() -> str:
    """The device that ``--device auto`` takes, asked of the driver itself."""
    if count := cuda_count():
        name = ctypes.create_string_buffer(256)
        ctypes.CDLL("libcuda.so.1").cuDeviceGetName(name, 256, 0)
        return f"device cuda: {count} x {name.value.decode(errors='replace')}"
    return f"device cpu: {platform.machine()}"


def cuda_count() -> int | None:
    """How many CUDA devices the installed torch can use, asked of the driver itself; None: only torch can
    tell (one for ROCm calls that CUDA, and not everywhere are drivers found like this)."""
    if sys.platform == "darwin":
        return 0
    if sys.platform != "linux":
        return None
    try:
        libraries = Path(str(distribution("torch").locate_file("torch/lib")))
    except PackageNotFoundError:
        return None
    if not (libraries / "libtorch_cuda.so").exists():
        return None if (libraries / "libtorch_hip.so").exists() else 0
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):  # no driver, or one without these functions
        return 0
    return count.value if ready else 0
