"""Number formats against the `gguf` package's own: values of all, blocks of those that can be written."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tokenswift.kernels.formats import BY_CODE, FORMATS, Format, Stored

HALVES = {  # where a block holds float16 numbers
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q3_k": (108,),
    "q2_k": (80, 82),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
EXTREMES = (0.0, -0.0, 2**-24, -(2**-24), 2**-14 - 2**-24, 2**-14, 65504.0, -65504.0, 1.0)
WRITTEN = [name for name, format in FORMATS.items() if format.encode is not None]


def random_blocks(format: Format, rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """Blocks of random bytes with finite scales, extreme ones in the first rows."""
    made = np.random.default_rng(seed)
    blocks = made.integers(0, 256, (rows, count, format.nbytes), np.uint8)
    for at in HALVES[format.name]:
        numbers = made.standard_normal((rows, count)).astype(np.float16)
        numbers[:9] = np.array(EXTREMES, np.float16)[:, None]
        blocks[..., at : at + 2] = made.permutation(numbers, axis=1)[..., None].view(np.uint8)
    first = HALVES[format.name][0]
    rest = slice(0, first) if first else slice(max(HALVES[format.name]) + 2, None)
    blocks[-1, ..., rest], blocks[-2, ..., rest] = 255, 0
    return torch.from_numpy(blocks.reshape(rows, -1))


def kind(format: Format) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.name.upper()]


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    format = FORMATS[name]
    assert BY_CODE[format.code] is format and kind(format).value == format.code
    assert gguf.GGML_QUANT_SIZES[kind(format)] == (format.block, format.nbytes)
    for seed in range(3):
        blocks = random_blocks(format, 40, 3, seed)
        stored = Stored(format, blocks)
        expected = torch.from_numpy(gguf.dequantize(blocks.numpy(), kind(format)))
        assert stored.shape == expected.shape and len(stored) == len(expected)
        assert torch.equal(stored.decode(), expected)


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_are_those_of_the_gguf_package(name: str) -> None:
    format = FORMATS[name]
    torch.manual_seed(0)
    rows = torch.randn(64, 256) * torch.logspace(-6, 4, 64)[:, None]
    rows[0], rows[1], rows[2], rows[3] = 0, 1.0, -3.0, torch.arange(256) / 7
    rows[4, ::2] = -rows[4, 1::2]  # the largest twice, with either sign
    rows[5] = torch.arange(-128, 128) / 2  # halves, which are rounded away from zero
    assert format.encode is not None
    assert torch.equal(format.encode(rows), torch.from_numpy(gguf.quantize(rows.numpy(), kind(format))))
    rows = rows[24:]  # whose scales are no subnormal numbers
    far = (Stored(format, format.encode(rows)).decode() - rows).norm() / rows.norm()
    assert float(far) < {"q8_0": 0.01, "q4_1": 0.1, "q4_0": 0.12}[name]


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_too_small_for_a_scale_are_nothing(name: str) -> None:
    format = FORMATS[name]
    assert format.encode is not None
    decoded = Stored(format, format.encode(torch.full((1, 32), 1e-44) * torch.arange(32))).decode()
    assert torch.equal(decoded, torch.zeros(1, 32))


@pytest.mark.parametrize("name", FORMATS)
def test_columns_must_be_whole_blocks(name: str) -> None:
    format = FORMATS[name]
    assert format.row_bytes(4 * format.block) == 4 * format.nbytes
    with pytest.raises(
        ValueError, match=f"a {name} weight has 33 columns; valid: a multiple of {format.block}"
    ):
        format.row_bytes(33)
