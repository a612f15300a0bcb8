"""Panels of low-bit weights hold what blocks hold, and products with them are those of the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from tests.kernels.rows import random_weight
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.formats.format import Format, Stored
from tokenswift.kernels.formats.panels import PANEL, fill_panels, numbers_of, panel_bytes
from tokenswift.kernels.formats.registry import FORMATS, Q4_1, Q8_0
from tokenswift.kernels.torch import TorchBackend, quantized
from tokenswift.kernels.weights import Packed
from tokenswift.models.target import backend_for

ALL = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


@pytest.fixture(scope="module")
def kernels() -> CpuBackend:
    backend = backend_for()
    if not isinstance(backend, CpuBackend):
        pytest.skip("no compiled kernels here")
    return backend


def panels_of(stored: Stored, fill: Callable[[Stored, torch.Tensor], None]) -> torch.Tensor:
    """The panels of a weight, made over other numbers."""
    rows, columns = stored.shape
    made = torch.full((-(-rows // PANEL), panel_bytes(stored.format, columns)), 255, dtype=torch.uint8)
    fill(stored, made)
    return made


@ALL
@pytest.mark.parametrize("rows", [1, 32, 70])
def test_kernels_pack_as_torch_does(kernels: CpuBackend, form: Format, rows: int) -> None:
    stored = random_weight(form, rows, 512, rows)
    packed = kernels.pack(stored)
    assert torch.equal(packed.data, panels_of(stored, fill_panels))
    several = kernels.pack([stored, random_weight(form, 64, 512, 1), stored])
    assert torch.equal(several.unpack()[-rows:], stored.decode())


@ALL
@pytest.mark.parametrize("rows", [1, 32, 70])
def test_packing_is_reversible(form: Format, rows: int) -> None:
    stored = random_weight(form, rows, 512, rows)
    given, found = form.split(stored.blocks), numbers_of(form, panels_of(stored, fill_panels), rows)
    for field in fields(given):
        before, after = getattr(given, field.name), getattr(found, field.name)
        assert (before is None) == (after is None), field.name
        if before is not None:
            assert torch.equal(before, after), field.name


@ALL
def test_a_packed_weight_takes_the_bytes_of_the_file(form: Format) -> None:
    stored = random_weight(form, 64, 512, 0)
    packed = Packed(stored, panels=True)
    more = {"q2_k": 2, "q3_k": 1.4}.get(form.name, 1.05)  # the first two hold numbers in 4 bits
    assert packed.nbytes <= more * stored.blocks.numel()
    assert torch.equal(packed.unpack(), stored.decode())


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_bits_of_the_unpacked_weight(
    kernels: CpuBackend, form: Format, dtype: torch.dtype
) -> None:
    stored = random_weight(form, 70, 512, 5)
    packed, dense = Packed(stored, True, dtype), Packed(stored.decode().to(dtype), True)
    for rows in (1, 2, 5, 8, 9, 40, 100):
        states = torch.randn(rows, 512)
        assert torch.equal(kernels.linear(states, packed), kernels.linear(states, dense))


@ALL
def test_whole_numbers_give_the_references_products(kernels: CpuBackend, form: Format) -> None:
    stored, states = random_weight(form, 70, 512, 3), torch.randn(29, 512)  # tiles of 12 rows and of 5
    found = kernels.linear(states, Packed(stored, True), None, torch.int8)
    expected = TorchBackend().linear(states, Packed(stored, False), None, torch.int8)
    size = (quantized(states).abs() @ stored.decode().abs().T).clamp_min(1e-9)
    assert ((found - expected).abs() / size).max() < 1e-6
    assert not torch.equal(found, kernels.linear(states, Packed(stored, True)))  # another model


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(kernels: CpuBackend, bad: float) -> None:
    states = torch.randn(2, 64)
    states[1, 40] = bad
    found = kernels.linear(states, Packed(random_weight(Q8_0, 40, 64, 1), True), None, torch.int8)
    assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_several_formats(kernels: CpuBackend, dtype: torch.dtype) -> None:
    """Queries, keys and values of one projection may have a format each; a part that ends inside a panel is
    unpacked, and so are all."""
    states, dense = torch.randn(6, 256), torch.randn(32, 256).to(dtype)
    for rows, parts_expected in ((64, 3), (40, 1)):
        parts = [random_weight(Q4_1, rows, 256, 1), random_weight(FORMATS["q6_k"], 32, 256, 2), dense]
        packed = Packed(parts, True, dtype)
        assert len(packed.parts) == parts_expected and not packed.stored
        values = torch.cat([p.decode().to(dtype) if isinstance(p, Stored) else p for p in parts])
        assert torch.equal(packed.unpack(), values)
        bias = torch.randn(len(values))
        expected = kernels.linear(states, Packed(values, True), bias)
        assert torch.equal(kernels.linear(states, packed, bias), expected)
        ids = torch.tensor([0, rows + 1, len(values) - 1])
        assert torch.equal(kernels.take(packed, ids), values[ids])


def test_neighbours_of_one_format_are_one_part() -> None:
    parts = [random_weight(Q8_0, 20, 64, 1), random_weight(Q8_0, 9, 64, 2)]
    packed = Packed(parts, panels=True)
    assert len(packed.parts) == 1 and packed.stored and packed.rows == 29
    assert torch.equal(packed.unpack(), torch.cat([part.decode() for part in parts]))


def test_other_types_of_products_are_unpacked() -> None:
    stored = random_weight(Q8_0, 20, 64, 1)
    packed = Packed(stored, True, torch.float16)
    assert packed.dtype == torch.float16 and not packed.stored
    assert torch.equal(packed.unpack(), stored.decode().half())
