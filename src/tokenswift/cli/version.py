"""What ``tokenswift --version`` shows, without importing torch (which takes seconds)."""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from importlib.metadata import distribution, version
from pathlib import Path

from tokenswift.kernels.cpu.library import describe
from tokenswift.version import __version__


def text() -> str:
    """``tokenswift 0.1.0 (torch …, transformers …, Python …; device cpu: x86_64; CPU kernels: …)``.

    Raises:
        InputError: ``TOKENSWIFT_KERNELS`` names nothing that there is.
    """
    parts = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    about = f"{', '.join(parts)}, Python {platform.python_version()}; {_device()}; CPU kernels: {describe()}"
    return f"tokenswift {__version__} ({about})"


def _device() -> str:
    """The device that ``--device auto`` takes, asked of the driver itself."""
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    with suppress(OSError, AttributeError):  # no driver, or one without these functions
        if Path(str(distribution("torch").locate_file("torch/lib/libtorch_cuda.so"))).exists():
            driver = ctypes.CDLL("libcuda.so.1")
            if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
                driver.cuDeviceGetName(name, 256, 0)
                return f"device cuda: {count.value} x {name.value.decode(errors='replace')}"
    return f"device cpu: {platform.machine()}"
