"""What is done before kernels are checked, and what is recorded once a backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.cases import CPU
from tests.kernels.cuda.test_backend import Unstarted
from tests.tiny import tiny_model
from tokenswift import SamplingParams
from tokenswift.interfaces import Segment
from tokenswift.kernels.case import Case
from tokenswift.kernels.cuda import check, launch, products
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.plan import Plan
from tokenswift.kernels.cuda.reference import Reference
from tokenswift.kernels.torch import TorchBackend
from tokenswift.loader.rope import rotary_of
from tokenswift.models import target as targets
from tokenswift.models.decoder import NativeTarget
from tokenswift.types import InputError


def test_kernels_are_compiled_together_before_they_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    """All passes of the check while nothing runs; a compiler that cannot is no reason to give up."""

    class Compiled(Reference):
        widths: set[int] = set()
        fails, enough = False, 5

        @contextmanager
        def compiling(self) -> Iterator[None]:
            yield
            if self.fails:
                raise RuntimeError("no thread\nleft")

        def attend(self, plan: Plan, query: Tensor, *rest: Any) -> Tensor:
            self.widths.add(query.shape[-1])
            return super().attend(plan, query, *rest)

    ops = Compiled()
    check.compile_all(CudaBackend("cpu", ops))
    assert ops.widths == {40, 128} and ops.enough == 5 and not caplog.messages
    ops.fails = True
    check.compile_all(CudaBackend("cpu", ops))
    assert caplog.messages == ["kernels are compiled one after the other here (no thread left)"]


@pytest.mark.parametrize(
    "version,here,capability,said",
    [
        ("3.5.1", True, (9, 0), "Triton is 3.5.1; valid: 3.6 and newer"),
        ("2.12.0+git12", True, (9, 0), "Triton is 2.12.0+git12; valid: 3.6 and newer"),
        (None, True, (9, 0), "Triton cannot be imported: import of triton halted; None in sys.modules"),
        ("3.6.0", False, (9, 0), "torch finds no CUDA device"),
        ("3.7.1", True, (7, 5), "Some Card has compute capability 7.5; valid: 8.0 and newer"),
        ("3.10.0", True, (8, 0), "no driver that could be loaded"),
        ("4.0", True, (12, 0), "no driver that could be loaded"),
    ],
)
def test_torch_takes_over_where_kernels_cannot_be_tried(
    version: str | None,
    here: bool,
    capability: tuple[int, int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, and the torch path; with the backend asked for, an error. What can be tried is started."""

    def load(*_: Any) -> None:
        raise RuntimeError("no driver that\ncould be loaded")

    triton = pytest.importorskip("triton")
    if version is None:
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    monkeypatch.setattr(products, "settle", load)
    monkeypatch.setattr(targets, "_backends", {})
    made = targets.backend_for("cuda:0")
    assert isinstance(made, TorchBackend) and not made.equal_bits
    assert caplog.messages == [f"the CUDA kernels do not work here ({said}); the slower torch path is used"]
    with pytest.raises(InputError) as refused:
        targets.backend_for("cuda:0", "cuda")
    line = f"backend is 'cuda', but the CUDA kernels do not work here ({said}); valid: auto, torch"
    assert str(refused.value) == line


@pytest.mark.parametrize("same", [True, False])
def test_larger_blocks_are_left_where_they_have_other_bits(
    same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Blocks(Reference):
        def product(self, states: Tensor, weight: Tensor, bias: Any, fold: bool = True) -> Tensor:
            made = torch.stack([weight.float() @ row for row in states.float()])
            return (made + 1e-6 * (len(states) > 64 and not same))[None]

    assert check.same_blocks(CudaBackend("cpu", Blocks())) is same
    assert len(caplog.messages) == (not same)


@pytest.mark.parametrize("same", [True, False])
def test_spans_are_kept_where_long_chains_have_other_bits(
    same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Rows(Reference):
        enough, seen = 5, set[tuple[int, int]]()

        def attend(self, plan: Plan, query: Tensor, *rest: Any) -> Tensor:
            self.seen.add((len(query), self.enough))
            return query + (plan.long and not same)

    assert check.same_rows(CudaBackend("cpu", ops := Rows())) is same
    assert ops.seen == {(80, 1), (1, 1)} and ops.enough == 5
    assert len(caplog.messages) == (not same)


def test_rankings_are_recorded_once_a_backend_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend("cpu")
    one, other = (backend.ranker(SamplingParams(seed=seed)) for seed in (1, 2))
    assert one is not None and other is not None and one._replays is other._replays is not None
    graphs = Graphs(CPU, 2)
    for key in ("a", "b", "a", "c"):
        graphs.run(key, torch.neg, torch.ones(1))
    assert [key[0] for key in graphs._kept] == ["a", "c"]  # type: ignore[index]


@pytest.mark.parametrize("defect", [None, "bits", "none"])
def test_layers_take_more_launches_where_few_do_not_work(
    defect: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Layers(Reference):
        def gate_product(self, states: Tensor, *rest: Any) -> Tensor:
            if defect == "none":
                raise RuntimeError("no such\nkernel")
            made = super().gate_product(states, *rest)
            return made * (1 + 2**-7) if defect else made

    backend = CudaBackend("cpu", Layers())
    assert check.same_layers(backend) is (defect is None) and backend.ops.fused
    said = {"bits": ["they have other bits"], "none": ["no such kernel"]}.get(defect or "", [])
    assert caplog.messages == [
        f"layers in few launches do not work here ({why}); they take more" for why in said
    ]


@pytest.mark.parametrize("rows,fused", [(1, True), (16, True), (64, True), (1, False), (16, False)])
def test_a_layer_is_six_launches_or_ten(rows: int, fused: bool) -> None:
    """A device without memory stands for the card: kernels alone, none that copies, adds up or fills up. A
    pass has one more, before the first layer."""
    meta, ops = torch.device("meta"), Unstarted()
    ops.fused = fused
    model = tiny_model("llama").to(meta, torch.bfloat16)
    target = NativeTarget(model, CudaBackend(meta, ops), rotary_of(model))
    cache, numbers = target.new_cache(80), torch.arange(rows)
    target.run([Segment(numbers, numbers, cache)], False, target.body)
    if fused:
        layer = [
            "turn_product",
            "attend_chunks",
            "attend_merge",
            "add_product",
            "gate_product",
            "add_product",
        ]
        assert len(layer) == 6 and ops.started == ["row_squares", *layer * target.layers]
        return
    block = ["product", "turn_append", "attend_chunks", "attend_merge", "product"]
    layer = ["add_norm", *block, "add_norm", "product", "gated", "product"]
    assert len(layer) == 10 and ops.started == layer * target.layers
    ops.started.clear()
    ops.fused = True  # which takes no pass of many rows
    target.run([Segment(torch.arange(65), torch.arange(65), cache)], False, target.body)
    assert "turn_append" in ops.started and "turn_product" not in ops.started


@pytest.mark.parametrize(
    "fails,made",
    [
        ("", {}),
        ("same_blocks", {"wide": False}),
        ("same_rows", {"enough": check.NEVER}),
        ("same_layers", {"fused": False}),
        ("unrecorded", {"graphs": False}),
        ("int8_fault", {"int8_keys": False}),
    ],
)
def test_what_does_not_work_on_a_card_is_left_out(
    fails: str, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each by itself; the rest of the backend is used."""

    class Started(Reference):
        wide, enough = True, 128

    monkeypatch.setattr(launch, "Kernels", lambda device: Started())
    monkeypatch.setattr(products, "settle", lambda: None)
    monkeypatch.setattr(check, "unfit", lambda device: None)
    monkeypatch.setattr(check, "compile_all", lambda backend: None)
    for name in ("same_blocks", "same_rows", "same_layers"):
        monkeypatch.setattr(check, name, lambda backend, name=name: name != fails)
    for name in ("fault", "unrecorded", "int8_fault"):
        monkeypatch.setattr(check, name, lambda *given, name=name, **more: "why" if name == fails else None)
    backend = check.started(CPU)
    assert isinstance(backend, CudaBackend) and backend.equal_bits and backend.prepares
    places = {"wide": backend.ops, "enough": backend.ops, "fused": backend.ops}
    usual = {"wide": True, "enough": 128, "fused": True, "graphs": True, "int8_keys": True}
    found = {name: getattr(places.get(name, backend), name) for name in usual}
    assert found == usual | made
    assert any("why" in message for message in caplog.messages) == (fails in ("unrecorded", "int8_fault"))
    monkeypatch.setattr(check, "fault", lambda *given, **more: "other numbers")
    assert check.started(CPU) == "other numbers"


def test_a_pass_has_states_for_the_rows_that_fill_it_up() -> None:
    """A kernel works on all rows of a batch, so fewer states would be read and written beyond."""
    backend = CudaBackend("cpu")
    case = Case(backend, torch.float32)
    batch = backend.batch([Segment(torch.arange(1), torch.arange(1), cast(Any, case.keys))], case.shape)
    states, body = case.states[:1].clone(), backend.body(case.shape, case.weights)
    assert len(batch.tokens) == 16
    with pytest.raises(ValueError, match="1 states and 1 angles are of 16 rows"):
        backend.layers(body, states, case.cos[:1], case.sin[:1], batch)
