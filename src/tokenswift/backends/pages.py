"""Large pages for what every pass reads: fewer address translations, some percent of bandwidth."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_LEAST = 1 << 22  # bytes below which it does not matter
_PAGE = 4096
_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux


def large_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor; on the CPU the system is asked to back it by large pages (Linux)."""
    made = torch.empty(*shape, dtype=dtype, device=device)
    size, at = made.numel() * made.element_size(), made.data_ptr()
    if made.device.type == "cpu" and size >= _LEAST and sys.platform == "linux":
        start = -(-at // _PAGE) * _PAGE
        # a wish: where the system does not grant it, nothing changes
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t((at + size - start) // _PAGE * _PAGE), _HUGEPAGE
        )
    return made
