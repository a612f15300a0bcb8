"""Do the kernels work on the card at hand? Asked once a process, before the first model is loaded.

A small random model's last positions run alone, all at once, in trees with wrong branches and beside another
text's: they have to be near what torch makes of them, and equal to each other byte by byte.
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import version

import torch

from tokenswift.files import line_of
from tokenswift.kernels import check
from tokenswift.kernels.check import TAIL, WIDTH, Case
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.products import settle
from tokenswift.kernels.torch import TorchBackend

logger = logging.getLogger("tokenswift")
OLDEST, CAPABLE = (3, 6), (8, 0)  # Triton, and a card's compute capability
USUAL = 128  # width of most models' heads
#: greatest relative distance of states from torch's, by type
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def started(device: torch.device, graphs: bool = True) -> CudaBackend | str:
    """The backend of a device; or in one line why it does not work there. ``graphs``: record passes."""
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
    except Exception as error:  # Triton, its compiler, the driver and torch each raise their own here
        return line_of(error)
    if graphs and (found := unrecorded(backend)) is not None:
        logger.warning("CUDA graphs do not work here (%s); kernels are started one by one", found)
    backend.records = graphs and found is None
    backend.build = f"triton {version('triton')}"
    return backend


def kinds() -> list[tuple[torch.dtype, int]]:
    """Types and widths of heads that are tried."""
    return [*((dtype, WIDTH) for dtype in NEAR), (torch.bfloat16, USUAL)]


def unfit(device: torch.device) -> str | None:
    """Why kernels cannot even be tried on a device, in one line: a compiler that does not know a card, or its
    types, may end the process; None where they can. Newer Tritons are tried, and the check decides."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {line_of(error)}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if numbers < OLDEST:
        return f"Triton is {triton.__version__}; valid: 3.6 and newer"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABLE:
        name, has = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"{name} has compute capability {has}; valid: 8.0 and newer"
    return None


@torch.inference_mode()
def fault(backend: CudaBackend, dtype: torch.dtype, width: int) -> str | None:
    """What is wrong with a backend's kernels; None when they are right."""
    case = Case(backend, dtype, width=width)
    found = case.run(backend, [[row] for row in range(TAIL)])
    expected = case.run(TorchBackend(backend.device), [list(range(TAIL))])
    far = float((found - expected).norm() / expected.norm())
    if not far <= NEAR[dtype]:
        return f"{case.name} is {far:.1e} of its size from torch"
    return check.fault([backend], case)


@torch.inference_mode()
def unrecorded(backend: CudaBackend) -> str | None:
    """Why a backend's passes cannot be recorded; None when replays give the bits of eager passes."""
    case = Case(backend, torch.bfloat16)
    expected, rows = case.run(backend, [list(range(TAIL))]), [[row] for row in range(TAIL)]
    backend.records = True
    try:
        found = [case.run(backend, passes) for passes in (rows, rows, [list(range(TAIL))])]
    except RuntimeError as error:  # torch, the driver and Triton's launcher
        return line_of(error)
    finally:
        backend.records = False
    return None if all(torch.equal(one, expected) for one in found) else "replays have other bits"
