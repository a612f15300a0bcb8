"""Triton's interpreter made strict: each load and store is held against the memory that tensors
have, and products sum in an order of their own."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenswift.kernels.cuda.launch import Kernels


def memory(given: dict[str, Any]) -> np.ndarray:
    """Start and end of each tensor's memory, (m, 2), by their starts: of those given, and of all
    others, as kernels find caches by their distance from one place."""
    found = dict[int, int]()
    for one in (*given.values(), *gc.get_objects()):
        if type(one) in (Tensor, torch.nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
    return np.array(sorted(found.items()), dtype=np.int64)


@pytest.fixture(autouse=True)
def in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads or writes anywhere else fails before it does."""
    from triton.runtime.interpreter import InterpreterBuilder

    run, known = Kernels.run, [np.empty((0, 2), dtype=np.int64)]

    def started(self: Any, *args: Any, **given: Any) -> None:
        known[0] = memory(given)
        run(self, *args, **given)

    def looked_at(real: Any) -> Any:
        def access(self: Any, pointers: Any, *rest: Any) -> Any:
            mask = rest[0] if real.__name__ == "create_masked_load" else rest[1]
            asked = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
            places, size = (
                pointers.data[asked].astype(np.int64),
                pointers.get_element_ty().primitive_bitwidth // 8,
            )
            at = np.searchsorted(known[0][:, 0], places, side="right") - 1
            out = (at < 0) | (places + size > known[0][np.maximum(at, 0), 1])
            assert not out.any(), f"{int(out.sum())} of {len(places)} places are in no tensor"
            return real(self, pointers, *rest)

        return access

    monkeypatch.setattr(Kernels, "run", started)
    for name in ("create_masked_load", "create_masked_store"):
        monkeypatch.setattr(InterpreterBuilder, name, looked_at(getattr(InterpreterBuilder, name)))


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products add one term after the other: numpy's leave it to a BLAS, whose order changes with
    the shape and the processor, so that equal bits would say nothing of the kernels."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        x, y = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = np.zeros_like(d.data)
        for k in range(x.shape[-1]):
            total += x[..., :, k, None] * y[..., k, None, :]
        return TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
