"""The CUDA backend on CPU tensors, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.models import target as targets


def library(states: Tensor, weight: Tensor) -> Tensor:
    """In place of the vendor's: padded rows, as on the card."""
    assert len(states) in (16, 64, 512)
    return states.float() @ weight.float().T


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other much longer than these tiny products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The backend of the CPU for this test."""
    made = CudaBackend("cpu", library=library)
    made.walks = False  # all rows are chosen at once, as on a card
    monkeypatch.setitem(targets._backends, "cpu", made)
    return made
