"""Memory of tensors: in large pages, for many tensors, on the device."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes from which a tensor is given large pages
_PAGE = mmap.PAGESIZE  # 4 KiB on x86-64; 4, 16 or 64 on arm64
_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux
_SLAB = 1 << 26  # bytes that an arena takes at a time
_LINE = 64  # bytes of a cache line


def large_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor; on Linux the system is asked for large pages for it."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.device.type == "cpu" and tensor.nbytes >= _LARGE and sys.platform == "linux":
        begin = tensor.data_ptr()
        first_page = -(-begin // _PAGE) * _PAGE
        page_bytes = (begin + tensor.nbytes - first_page) // _PAGE * _PAGE
        # only advice: the system may ignore it
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first_page), ctypes.c_size_t(page_bytes), _HUGEPAGE
        )
    return tensor


class Arena:
    """Memory in large pages for many tensors, such as the weights of a model's layers: a
    processor's prefetch ends at a page's end. A slab is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the CPU, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        if size >= _SLAB // 4:
            return large_empty(size, dtype=torch.uint8).view(dtype).view(shape)
        if self._used + size > len(self._slab):
            self._slab = large_empty(_SLAB, dtype=torch.uint8)
            self._used = -self._slab.data_ptr() % _LINE
        begin = self._used
        self._used += -(-size // _LINE) * _LINE
        return self._slab[begin : begin + size].view(dtype).view(shape)


def to_device(numbers: Sequence[int] | Sequence[float], device: torch.device | str) -> Tensor:
    """A list of numbers as a tensor on a device, without waiting for the device."""
    device = torch.device(device)
    dtype = None if numbers else torch.long
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
