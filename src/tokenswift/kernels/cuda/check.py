"""Whether the kernels work here.

:func:`open_backend` finds out once a process, before the first model is loaded, whether the kernels
work on the card at hand: a small random model's last positions have to be near what torch computes,
and equal byte by byte alone, at once, in trees and beside another sequence.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import NamedTuple

import torch

from tokenswift.files import line_of
from tokenswift.kernels.base import Backend
from tokenswift.kernels.check import TAIL, WIDTH, Case, keeps_bits
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.products import set_blas_flags

logger = logging.getLogger("tokenswift")
CAPABLE = (8, 0)  # compute capability
MOST_MODELS_WIDTH = 128  # of heads
#: greatest relative distance of states from torch's, by type
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def open_backend(device: torch.device) -> CudaBackend | str:
    """The backend of a device; or in one line why it does not work there."""
    try:
        reason = unfit(device)
        if reason is not None:
            return reason
        set_blas_flags()
        backend = CudaBackend(device)
        reason = first_fault(backend)
        if reason is not None:
            return reason
    except Exception as error:  # Triton, its compiler, the driver and torch: each has its own
        return line_of(error)
    reason = unrecorded(backend)
    if reason is not None:
        logger.warning("CUDA graphs do not work here (%s); kernels are started one by one", reason)
    backend.records = reason is None
    backend.build = f"triton {version('triton')}"
    return backend


def first_fault(backend: CudaBackend) -> str | None:
    """What is wrong with a backend, whose passes are not recorded yet; None when it is right."""
    backend.equal_bits = True
    backend.records = False
    for kind in kinds():
        reason = fault(backend, kind.dtype, kind.width)
        if reason is not None:
            return reason
    return None if backend.equal_bits else "products do not keep rows' bits"


class Kind(NamedTuple):
    """A type of numbers and a width of heads that kernels are tried with."""

    dtype: torch.dtype
    width: int


def kinds() -> list[Kind]:
    """What kernels are tried with."""
    of_types = [Kind(dtype, WIDTH) for dtype in NEAR]
    return [*of_types, Kind(torch.bfloat16, MOST_MODELS_WIDTH)]


def unfit(device: torch.device) -> str | None:
    """Why kernels cannot even be tried on a device, in one line: a compiler that does not know a
    card, or its types, may end the process; None where they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABLE:
        return f"compute capability is {capability}; valid: {CAPABLE} and newer"
    return None


@torch.inference_mode()
def fault(backend: CudaBackend, dtype: torch.dtype, width: int) -> str | None:
    """What is wrong with a backend's kernels; None when they are right."""
    case = Case(backend, dtype, width=width)
    states = case.run(backend, range(TAIL + 1))
    expected = case.run(Backend(backend.device), (0, TAIL))
    distance = float((states - expected).norm() / expected.norm())
    if not distance <= NEAR[dtype]:
        return f"{case.name} is {distance:.1e} of its size from torch"
    if not keeps_bits([backend], case):
        return f"rows have other bits than alone, {case.name}"
    return None


@torch.inference_mode()
def unrecorded(backend: CudaBackend) -> str | None:
    """Why a backend's passes cannot be recorded; None when replays give the bits of eager
    passes."""
    case = Case(backend, torch.bfloat16)
    expected = case.run(backend, (0, TAIL))
    one_by_one = range(TAIL + 1)
    backend.records = True
    try:
        replays = [case.run(backend, cuts) for cuts in (one_by_one, one_by_one, (0, TAIL))]
    except RuntimeError as error:  # torch, the driver and Triton's launcher
        return line_of(error)
    finally:
        backend.records = False
    if all(torch.equal(states, expected) for states in replays):
        return None
    return "replays have other bits"
