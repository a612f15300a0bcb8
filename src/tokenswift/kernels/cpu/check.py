"""Whether a machine has CPU kernels that keep the rule: a row has the bits that it has alone."""

from __future__ import annotations

import ctypes
import hashlib
from contextlib import suppress
from pathlib import Path

import torch

from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.library import library, processor
from tokenswift.kernels.formats import FORMATS
from tokenswift.types import OnProgress


@torch.inference_mode()
def fault_of(library: ctypes.CDLL) -> str | None:
    """The first kind of layers in which a library's rows have other bits than alone, or None: on
    one and two threads, in every type, and with quantized weights."""
    from tokenswift.kernels.check import (  # needed once a machine
        BIASED,
        DELTA,
        MIXTURE,
        SHORT,
        Case,
        keeps_bits,
    )

    kernels = [CpuBackend(library, threads) for threads in (1, 2)]
    first = kernels[0]
    q8 = FORMATS["q8_0"]
    cases = [Case(first, dtype) for dtype in structs.TYPES]
    cases += [
        Case(first, torch.float32, FORMATS["q4_1"]),
        Case(first, torch.bfloat16, q8),
        Case(first, torch.float32, q8, torch.int8),
        Case(first, torch.float32, q8, torch.int8, keys=torch.int8),
        Case(first, torch.bfloat16, mixture=MIXTURE),
        Case(first, torch.float32, q8, torch.int8, keys=torch.int8, mixture=BIASED),
        Case(first, torch.bfloat16, recurrence=SHORT),
        Case(first, torch.bfloat16, recurrence=DELTA),
        Case(first, torch.float32, q8, torch.int8, recurrence=DELTA),
    ]
    return next((case.name for case in cases if not keeps_bits(kernels, case)), None)


def open_backend(folder: Path, on_progress: OnProgress | None = None) -> CpuBackend | str:
    """The backend of this machine; or in one line why it has no kernels, or none that keep the
    rule.

    Args:
        folder: where compiled libraries are, each with a file beside it once it has passed the
            check on a processor.
        on_progress: of `library.compiled`.
    Raises:
        InputError: the processor does not have the instruction set that is asked for.
    """
    kernels = library(folder, on_progress)
    if isinstance(kernels, str):
        return f"CPU kernels are not available ({kernels})"
    backend = CpuBackend(kernels)
    processor_digest = hashlib.sha256(processor().encode()).hexdigest()[:12]
    passed = folder / f"{Path(kernels._name).stem}-{processor_digest}.passed"
    if passed.exists():
        return backend
    fault = fault_of(kernels)
    if fault is not None:
        return f"the compiled CPU kernels give rows other bits than they have alone ({fault})"
    with suppress(OSError):  # then it is checked again next time
        passed.touch()
    return backend
