"""The CUDA backend on CPU tensors, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.cuda.cases import backend_on_cpu
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.models import target as targets


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other much longer than these tiny products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The backend of the CPU for this test: the kernels' work by torch, row by row."""
    backend = backend_on_cpu()
    monkeypatch.setitem(targets._backends, "cpu", backend)
    return backend
