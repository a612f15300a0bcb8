"""Number formats against the `gguf` package; panels hold what blocks hold, and products are of the
values."""

from __future__ import annotations

import gguf
import pytest
import torch

from tests.kernels.rows import random_weight
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.formats import BY_CODE, FORMATS, Q4_1, Q8_0, Format, Stored
from tokenswift.kernels.packed import Packed

ALL = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
WRITTEN = {"q8_0": 0.01, "q4_1": 0.1, "q4_0": 0.12}  # and how far off weights may be


@ALL
def test_sizes_are_those_of_the_gguf_package(form: Format) -> None:
    kind = gguf.GGMLQuantizationType[form.name.upper()]
    assert BY_CODE[form.code] is form
    assert kind.value == form.code
    assert gguf.GGML_QUANT_SIZES[kind] == (form.block, form.nbytes)
    assert random_weight(form, 40, 3 * form.block, 1).shape == (40, 3 * form.block)
    line = f"a {form.name} weight has 33 columns; valid: a multiple of {form.block}"
    with pytest.raises(ValueError, match=line):
        form.row_bytes(33)


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_hold_weights_and_those_too_small_for_a_scale_are_nothing(name: str) -> None:
    form = FORMATS[name]
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    distance = (Stored(form, form.encode(rows)).decode() - rows).norm() / rows.norm()
    assert float(distance) < WRITTEN[name]
    decoded = Stored(form, form.encode(torch.full((1, 32), 1e-44) * torch.arange(32))).decode()
    assert torch.equal(decoded, torch.zeros(1, 32))


@ALL
def test_packing_is_reversible_and_takes_the_bytes_of_the_file(
    kernels: CpuBackend, form: Format
) -> None:
    for rows in (1, 32, 70):
        stored = random_weight(form, rows, 512, rows)
        every = torch.arange(rows)
        reversed_rows = every.flip(0)
        packed = kernels.pack(stored)
        assert torch.equal(kernels.take(packed, every), stored.decode())
        selected = packed.select(reversed_rows)
        assert torch.equal(kernels.take(selected, every), stored.decode()[reversed_rows])
        several = kernels.pack([stored, random_weight(form, 64, 512, 1), stored])
        assert torch.equal(kernels.take(several, every + rows + 64), stored.decode())
    stored = random_weight(form, 64, 512, 0)
    # the first two hold numbers in 4 bits, the third its scales in 16
    bytes_per_byte = {"q2_k": 2, "q3_k": 1.4, "mxfp4": 18 / 17}.get(form.name, 1.05)
    assert kernels.pack(stored).nbytes <= bytes_per_byte * stored.blocks.numel()


def quantized(states: torch.Tensor) -> torch.Tensor:
    """What integers of 8 bits stand for: groups of 32, each with the scale of its largest."""
    groups = states.unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    top = torch.full_like(most, 127.0)  # a number over a tensor would be rounded twice
    integers = torch.where(most > 0, groups * (top / most), 0.0).round()
    return (integers * (most / top)).flatten(-2)


@ALL
def test_whole_numbers_give_the_references_products(kernels: CpuBackend, form: Format) -> None:
    stored = random_weight(form, 70, 512, 3)
    states = torch.randn(29, 512)  # tiles of 12 rows and of 5
    packed = kernels.pack(stored)
    products = kernels.linear(states, packed, None, torch.int8)
    expected = Backend().linear(quantized(states), Packed(stored))
    size = (quantized(states).abs() @ stored.decode().abs().T).clamp_min(1e-9)
    assert ((products - expected).abs() / size).max() < 1e-6
    assert not torch.equal(products, kernels.linear(states, packed))  # another model


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(kernels: CpuBackend, bad: float) -> None:
    states = torch.randn(2, 64)
    states[1, 40] = bad
    packed = kernels.pack(random_weight(Q8_0, 40, 64, 1))
    products = kernels.linear(states, packed, None, torch.int8)
    assert products[0].isfinite().all()
    assert products[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_several_formats(kernels: CpuBackend, dtype: torch.dtype) -> None:
    """Queries, keys and values of one projection may have a format each; a part that ends inside a
    panel is unpacked, and so are all."""
    states = torch.randn(6, 256)
    dense = torch.randn(32, 256).to(dtype)
    for rows, part_count in ((64, 3), (40, 1)):
        parts = [
            random_weight(Q4_1, rows, 256, 1),
            random_weight(FORMATS["q6_k"], 32, 256, 2),
            dense,
        ]
        packed = kernels.pack(parts, dtype)
        assert len(packed.parts) == part_count
        assert not packed.stored
        decoded = [part.decode().to(dtype) if isinstance(part, Stored) else part for part in parts]
        values = torch.cat(decoded)
        bias = torch.randn(len(values))
        expected = kernels.linear(states, kernels.pack(values), bias)
        assert torch.equal(kernels.linear(states, packed, bias), expected)


def test_other_types_of_products_are_unpacked(kernels: CpuBackend) -> None:
    stored = random_weight(Q8_0, 20, 64, 1)
    packed = kernels.pack(stored, torch.float16)
    assert packed.dtype == torch.float16
    assert not packed.stored
    assert torch.equal(packed.unpack(), stored.decode().half())
