"""Whether the kernels work here.

:func:`started` asks once a process, before the first model is loaded, whether the kernels work on
the card at hand: a small random model's last positions have to be near what torch makes of them,
and equal byte by byte alone, at once, in trees and beside a text.
"""

from __future__ import annotations

import logging
from importlib.metadata import version

import torch

from tokenswift.files import line_of
from tokenswift.kernels.base import Backend
from tokenswift.kernels.check import TAIL, WIDTH, Case, keeps_bits
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.products import settle

logger = logging.getLogger("tokenswift")
CAPABLE = (8, 0)  # compute capability
USUAL = 128  # width of most models' heads
#: greatest relative distance of states from torch's, by type
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def started(device: torch.device) -> CudaBackend | str:
    """The backend of a device; or in one line why it does not work there."""
    try:
        if (found := unfit(device)) is not None:
            return found
        settle()
        backend = CudaBackend(device)
        backend.equal_bits, backend.records = True, False
        found = next(filter(None, (fault(backend, *kind) for kind in kinds())), None)
        if found is None and not backend.equal_bits:
            found = "products do not keep rows' bits"
        if found is not None:
            return found
    except (
        Exception
    ) as error:  # Triton, its compiler, the driver and torch each raise their own here
        return line_of(error)
    if (found := unrecorded(backend)) is not None:
        logger.warning("CUDA graphs do not work here (%s); kernels are started one by one", found)
    backend.records = found is None
    backend.build = f"triton {version('triton')}"
    return backend


def kinds() -> list[tuple[torch.dtype, int]]:
    """Types and widths of heads that are tried."""
    return [*((dtype, WIDTH) for dtype in NEAR), (torch.bfloat16, USUAL)]


def unfit(device: torch.device) -> str | None:
    """Why kernels cannot even be tried on a device, in one line: a compiler that does not know a
    card, or its types, may end the process; None where they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    return (
        None
        if capability >= CAPABLE
        else f"compute capability is {capability}; valid: {CAPABLE} and newer"
    )


@torch.inference_mode()
def fault(backend: CudaBackend, dtype: torch.dtype, width: int) -> str | None:
    """What is wrong with a backend's kernels; None when they are right."""
    case = Case(backend, dtype, width=width)
    found = case.run(backend, range(TAIL + 1))
    expected = case.run(Backend(backend.device), (0, TAIL))
    far = float((found - expected).norm() / expected.norm())
    if not far <= NEAR[dtype]:
        return f"{case.name} is {far:.1e} of its size from torch"
    return None if keeps_bits([backend], case) else f"rows have other bits than alone, {case.name}"


@torch.inference_mode()
def unrecorded(backend: CudaBackend) -> str | None:
    """Why a backend's passes cannot be recorded; None when replays give the bits of eager
    passes."""
    case = Case(backend, torch.bfloat16)
    expected, rows = case.run(backend, (0, TAIL)), range(TAIL + 1)
    backend.records = True
    try:
        found = [case.run(backend, cuts) for cuts in (rows, rows, (0, TAIL))]
    except RuntimeError as error:  # torch, the driver and Triton's launcher
        return line_of(error)
    finally:
        backend.records = False
    return None if all(torch.equal(one, expected) for one in found) else "replays have other bits"
