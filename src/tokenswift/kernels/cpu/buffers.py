"""The boundary to C: every tensor that the kernels read or write is looked at here, and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor


def address(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where a tensor's numbers are, for C, which takes their type and number on trust.

    Args:
        name: for the message.
        dtype: the type that C reads or writes.
        shape: the sizes that C goes by.
    Raises:
        ValueError: the tensor is of another type or shape, on another device, or not contiguous.
    """
    if (
        tensor.dtype != dtype
        or tensor.shape != shape
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
    ):
        gaps = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}{gaps}; "
            f"valid: {dtype} of shape {shape} on cpu, contiguous"
        )
    return tensor.data_ptr()
