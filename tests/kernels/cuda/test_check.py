"""What a card has to pass before its kernels are used."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.cases import CPU, TorchOps, product
from tokenswift.kernels.cuda import check
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.plan import CudaBatch
from tokenswift.kernels.weights import Shape
from tokenswift.models import target as targets
from tokenswift.types import InputError


@pytest.mark.parametrize(
    "capability,reason",
    [
        ((7, 5), "compute capability is (7, 5); valid: (8, 0) and newer"),
        ((8, 0), "no driver that could be loaded"),
    ],
)
def test_torch_takes_over_where_kernels_cannot_be_tried(
    capability: tuple[int, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, and the torch path; with the backend asked for, an error. What can be tried is
    started."""

    def load() -> None:
        raise RuntimeError("no driver that\ncould be loaded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(check, "set_blas_flags", load)
    monkeypatch.setattr(targets, "_backends", {})
    backend = targets.backend_for("cuda:0")
    assert backend.name == "torch"
    assert not backend.equal_bits
    assert caplog.messages == [
        f"the CUDA kernels do not work here ({reason}); the slower torch path is used"
    ]
    with pytest.raises(InputError) as refused:
        targets.backend_for("cuda:0", "cuda")
    line = (
        f"backend is 'cuda', but the CUDA kernels do not work here ({reason}); valid: auto, torch"
    )
    assert str(refused.value) == line


class FarOff(TorchOps):
    def gated(self, gate_up: Tensor, dtype: torch.dtype, gelu: bool = False) -> Tensor:
        return super().gated(gate_up, dtype, gelu) * 2


class SeesOthers(TorchOps):
    """Attention that sees the other rows of a pass."""

    def attend(
        self, batch: CudaBatch, query: Tensor, layer: int, shape: Shape, window: int
    ) -> Tensor:
        out = super().attend(batch, query, layer, shape, window)
        return out + out[1:].abs().mean() / 1000


@pytest.mark.parametrize("ops,reason", [(FarOff(), "from torch"), (SeesOthers(), "other bits")])
def test_kernels_that_do_not_work_are_found(ops: TorchOps, reason: str) -> None:
    backend = CudaBackend("cpu", ops, product)
    assert reason in str(check.fault(backend, torch.float32, 40))


def test_kernels_that_work_pass() -> None:
    backend = CudaBackend("cpu", TorchOps(), product)
    assert check.fault(backend, torch.float32, 40) is None


@pytest.mark.parametrize("stale", [False, True])
def test_replays_that_do_not_work_are_not_used(
    stale: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers that keep what the first pass left in them stand for them."""
    first_outputs: dict[tuple[Graphs, Hashable], tuple[Tensor, ...]] = {}

    def run_once(
        self: Graphs,
        key: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        inputs: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:
        if (self, key) not in first_outputs:
            first_outputs[self, key] = work(**inputs)
        return first_outputs[self, key]

    if stale:
        monkeypatch.setattr(Graphs, "run", run_once)
    monkeypatch.setattr(check, "unfit", lambda device: None)
    monkeypatch.setattr(check, "set_blas_flags", lambda: None)
    monkeypatch.setattr(check, "kinds", lambda: [check.Kind(torch.float32, 40)])
    monkeypatch.setattr(check, "version", lambda name: "3.7")
    monkeypatch.setattr(
        check, "CudaBackend", lambda device: CudaBackend(device, TorchOps(), product)
    )
    backend = check.open_backend(CPU)
    assert isinstance(backend, CudaBackend)
    assert backend.equal_bits
    assert backend.records is not stale
    warnings = ["replays have other bits" in message for message in caplog.messages]
    assert warnings == [True] * stale
