"""Figures of machines: what is counted while it is timed, and over how much."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.kernels.torch import TorchBackend
from tokenswift.models.target import backend_for
from tokenswift.roofline import machine as machines
from tokenswift.roofline.machine import Processor, accelerator, machine_at
from tokenswift.roofline.passes import ITEM, Sizes, floor
from tokenswift.words import counted


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Everything takes half a second; what the timed calls return."""
    returned: list[object] = []

    def least(work: Callable[[], object]) -> float:
        returned.append(work())
        return 0.5

    monkeypatch.setattr(machines, "least", least)
    monkeypatch.setattr(machines, "BLOCK", 1 << 16)
    monkeypatch.setattr(machines, "KEYS", 300)
    return returned


def sizes(stored: str = "float32", dtype: str = "float32", count: int = 50_000, whole: bool = False) -> Sizes:
    return Sizes(96, 6, 2, 16, (0, 0, 0), {stored: count}, dtype, whole)


def test_a_figure_is_operations_over_seconds_and_measured_once(halves: list[object]) -> None:
    """A product has whole panels of 32 rows of the weight; attention goes through all three layers."""
    here = Processor(backend_for())
    rows_of_weight = 17 * 32  # the first multiple of 32 whose rows of 96 hold 50,000 weights
    assert here.products(sizes(), "float32", 4) == 2 * 4 * 96 * rows_of_weight / 0.5
    assert isinstance(halves[0], torch.Tensor) and halves[0].shape == (4, rows_of_weight)
    assert here.attention(sizes(), 5) == 4 * 5 * 6 * 16 * 300 * 3 / 0.5
    layers = halves[1]
    assert isinstance(layers, list) and [tuple(out.shape) for out in layers] == [(5, 6, 16)] * 3
    assert here.bandwidth == (1 << 16) / 0.5
    before = len(halves)
    for _ in range(2):
        floor(sizes(), here, 4, 1000)
        here.attention(sizes(), 5)
    assert len(halves) == before + 1  # attention of four rows was new


def test_what_is_timed_is_bounded(halves: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MOST", 96 * 32 * 4 * 2)  # bytes of two panels
    here = Processor(backend_for())
    here.products(sizes(count=10**12), "float32", 1)
    here.attention(sizes(count=10**12), 1)
    assert isinstance(halves[0], torch.Tensor) and halves[0].shape == (1, 64)
    assert isinstance(halves[1], list) and len(halves[1]) == 1


@pytest.mark.parametrize("stored", [*ITEM, *FORMATS])
@pytest.mark.parametrize("backend", [None, TorchBackend()])
def test_every_format_is_timed(stored: str, backend: TorchBackend | None, halves: list[object]) -> None:
    """By the kernels and by torch, in every type of product that takes it; a weight of zeros gives zeros."""
    here = Processor(backend or backend_for())
    ways = [(dtype, False) for dtype in ITEM if stored in (*FORMATS, dtype)]
    ways += [("float32", True)] if stored in FORMATS and here.keeps(stored, "float32") else []
    for dtype, whole in ways:
        assert here.products(sizes(stored, dtype, whole=whole), stored, 3) > 0
        made = halves[-1]
        assert isinstance(made, torch.Tensor) and not made.any()
        assert here.attention(sizes(dtype=dtype), 3) > 0


def test_the_machine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real clock: figures are positive and finite, whatever they are."""
    monkeypatch.setattr(machines, "BLOCK", 1 << 24)
    here = machine_at("cpu")
    assert (
        here.source == "measured here" and here.name == f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    )
    for figure in (here.products(sizes(), "float32", 1), here.attention(sizes(), 1), here.bandwidth):
        assert 0 < figure < float("inf")


def test_an_accelerator(halves: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of torch's own product, of every type; here on the CPU, where the same calls run."""
    monkeypatch.setattr(machines, "SIDE", 24)
    card = accelerator("some card", torch.device("cpu"))
    assert (card.name, card.source) == ("some card", "measured here")
    assert card.formats == backend_for("cpu").formats
    assert card.arithmetic == dict.fromkeys(ITEM, 2 * 24**3 / 0.5) and card.bandwidth == (1 << 16) / 0.5
    assert [made.dtype for made in halves[:3] if isinstance(made, torch.Tensor)] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    assert card.attention(sizes(dtype="bfloat16"), 7) == card.products(sizes(dtype="bfloat16"), "bfloat16", 7)
