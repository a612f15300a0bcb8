"""What is asked of a card before its kernels are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.cases import CPU, Rows, product
from tokenswift.kernels.cuda import check
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.models import target as targets
from tokenswift.types import InputError


@pytest.mark.parametrize(
    "capability,said",
    [
        ((7, 5), "compute capability is (7, 5); valid: (8, 0) and newer"),
        ((8, 0), "no driver that could be loaded"),
    ],
)
def test_torch_takes_over_where_kernels_cannot_be_tried(
    capability: tuple[int, int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, and the torch path; with the backend asked for, an error. What can be tried is
    started."""

    def load(*_: Any) -> None:
        raise RuntimeError("no driver that\ncould be loaded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(check, "settle", load)
    monkeypatch.setattr(targets, "_backends", {})
    made = targets.backend_for("cuda:0")
    assert made.name == "torch" and not made.equal_bits
    assert caplog.messages == [
        f"the CUDA kernels do not work here ({said}); the slower torch path is used"
    ]
    with pytest.raises(InputError) as refused:
        targets.backend_for("cuda:0", "cuda")
    line = f"backend is 'cuda', but the CUDA kernels do not work here ({said}); valid: auto, torch"
    assert str(refused.value) == line


class Far(Rows):
    def gated(self, *given: Any) -> Tensor:
        return super().gated(*given) * 2


class Beside(Rows):
    """Attention that sees the other rows of a pass."""

    def attend(self, batch: Any, query: Tensor, *rest: Any) -> Tensor:
        made = super().attend(batch, query, *rest)
        return made + made[1:].abs().mean() / 1000


@pytest.mark.parametrize(
    "ops,said", [(Rows(), None), (Far(), "from torch"), (Beside(), "other bits")]
)
def test_kernels_that_do_not_work_are_found(ops: Rows, said: str | None) -> None:
    backend = CudaBackend("cpu", ops, product)
    found = check.fault(backend, torch.float32, 40)
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize("wrong", [False, True])
def test_replays_that_do_not_work_are_not_used(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers that keep what the first pass left in them stand for them."""

    def stale(self: Any, key: Any, work: Any, *given: Tensor) -> Any:
        kept = self._kept.setdefault(key, work(*given))
        return kept

    if wrong:
        monkeypatch.setattr(Graphs, "run", stale)
    monkeypatch.setattr(check, "unfit", lambda device: None)
    monkeypatch.setattr(check, "settle", lambda: None)
    monkeypatch.setattr(check, "kinds", lambda: [(torch.float32, 40)])
    monkeypatch.setattr(check, "version", lambda name: "3.7")
    monkeypatch.setattr(check, "CudaBackend", lambda device: CudaBackend(device, Rows(), product))
    made = check.started(CPU)
    assert isinstance(made, CudaBackend) and made.equal_bits and made.records is not wrong
    assert ["replays have other bits" in message for message in caplog.messages] == [True] * wrong
