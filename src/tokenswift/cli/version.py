"""What ``tokenswift --version`` shows, without importing torch (which takes seconds)."""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from tokenswift.version import __version__


def text() -> str:
    """``tokenswift 0.1.0 (torch …, transformers …, Python …; device cpu)``."""
    parts = [f"{name} {_version(name)}" for name in ("torch", "transformers")]
    return f"tokenswift {__version__} ({', '.join(parts)}, Python {platform.python_version()}; {_device()})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _device() -> str:
    """The device that ``--device auto`` takes, asked of the driver itself."""
    if _has_cuda():
        with suppress(OSError, AttributeError):
            driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
            ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
            if ready and count.value:
                name = ctypes.create_string_buffer(256)
                driver.cuDeviceGetName(name, 256, 0)
                return f"device cuda: {count.value} x {name.value.decode(errors='replace')}"
    return f"device cpu: {platform.machine()}"


def _has_cuda() -> bool:
    """Whether the installed torch was built for CUDA."""
    with suppress(PackageNotFoundError):
        return Path(str(distribution("torch").locate_file("torch/lib/libtorch_cuda.so"))).exists()
    return False
