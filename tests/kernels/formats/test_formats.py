"""Number formats against the `gguf` package: what files call them, values that are no numbers, and sizes."""

from __future__ import annotations

import gguf
import pytest
import torch

from tests.kernels.rows import random_weight
from tokenswift.kernels.formats import BY_CODE, FORMATS, Stored

WRITTEN = [name for name, form in FORMATS.items() if form.encode is not None]


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    form, kind = FORMATS[name], gguf.GGMLQuantizationType[name.upper()]
    assert BY_CODE[form.code] is form and kind.value == form.code
    assert gguf.GGML_QUANT_SIZES[kind] == (form.block, form.nbytes)
    stored = random_weight(form, 40, 3 * form.block, 1)
    expected = torch.from_numpy(gguf.dequantize(stored.blocks.numpy(), kind))
    assert stored.shape == expected.shape and len(stored) == len(expected)
    assert torch.equal(stored.decode(), expected)
    with pytest.raises(
        ValueError, match=f"a {name} weight has 33 columns; valid: a multiple of {form.block}"
    ):
        form.row_bytes(33)


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_hold_weights_and_those_too_small_for_a_scale_are_nothing(name: str) -> None:
    form = FORMATS[name]
    assert form.encode is not None
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    far = (Stored(form, form.encode(rows)).decode() - rows).norm() / rows.norm()
    assert float(far) < {"q8_0": 0.01, "q4_1": 0.1, "q4_0": 0.12}[name]
    decoded = Stored(form, form.encode(torch.full((1, 32), 1e-44) * torch.arange(32))).decode()
    assert torch.equal(decoded, torch.zeros(1, 32))
