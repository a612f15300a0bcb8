"""Triton's interpreter made strict: each load and store is held against the memory that tensors
have, and products sum in an order of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.nn import Parameter

from tokenswift.kernels.cuda.launch import Kernels, TritonKernel


def memory_of(arguments: Mapping[str, object]) -> np.ndarray:
    """Start and end of each tensor's memory, (m, 2), by their starts: of a kernel's arguments, and
    of all others, as kernels find caches by their distance from one place."""
    ends = dict[int, int]()
    for each in (*arguments.values(), *gc.get_objects()):
        # by the exact type: other objects may answer isinstance with code of their own
        if type(each) is Tensor or type(each) is Parameter:
            if each.device.type == "cpu":
                storage = each.untyped_storage()
                ends[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
    return np.array(sorted(ends.items()), dtype=np.int64)


@pytest.fixture(autouse=True)
def in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads or writes anywhere else fails before it does."""
    from triton.runtime.interpreter import InterpreterBuilder

    run = Kernels.run
    known = [np.empty((0, 2), dtype=np.int64)]

    def run_and_note(
        self: Kernels,
        kernel: TritonKernel,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        **arguments: object,
    ) -> None:
        known[0] = memory_of(arguments)
        run(self, kernel, grid, warps, stages, **arguments)

    def check(pointers: Any, mask: Any) -> None:
        accessed = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        places = pointers.data[accessed].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        starts = known[0][:, 0]
        ends = known[0][:, 1]
        nearest = np.searchsorted(starts, places, side="right") - 1
        outside = (nearest < 0) | (places + size > ends[np.maximum(nearest, 0)])
        count = int(outside.sum())
        assert count == 0, f"{count} of {len(places)} places are in no tensor"

    def checked(real: Callable[..., object], mask_index: int) -> Callable[..., object]:
        def access(self: object, pointers: object, *arguments: object) -> object:
            check(pointers, arguments[mask_index])
            return real(self, pointers, *arguments)

        return access

    monkeypatch.setattr(Kernels, "run", run_and_note)
    for name, mask_index in (("create_masked_load", 0), ("create_masked_store", 1)):
        real = getattr(InterpreterBuilder, name)
        monkeypatch.setattr(InterpreterBuilder, name, checked(real, mask_index))


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products add one term after the other: numpy's leave it to a BLAS, whose order changes with
    the shape and the processor, so that equal bits would say nothing of the kernels."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: object, a: Any, b: Any, d: Any, *options: object) -> object:
        left = a.data.astype(d.data.dtype)
        right = b.data.astype(d.data.dtype)
        total = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
        return TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
