"""The CUDA backend's kernels on a card, in order of value (marker ``gpu``; run by
benchmarks/gpu.sh)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.cuda.cases import (  # noqa: E402
    batch_of,
    by_torch,
    random,
    segment,
    shape_of,
    tree,
)
from tests.tiny import FAMILIES, tiny_model  # noqa: E402
from tokenswift.kernels.cuda.backend import CudaBackend  # noqa: E402
from tokenswift.kernels.cuda.check import fault, kinds, open_backend, unrecorded  # noqa: E402
from tokenswift.kernels.cuda.launch import Kernels  # noqa: E402
from tokenswift.kernels.cuda.layers import CudaBody  # noqa: E402
from tokenswift.kernels.cuda.plan import CHUNK, FAR, NEAR  # noqa: E402
from tokenswift.kernels.cuda.products import counts_that_keep_bits, cublas, set_blas_flags  # noqa: E402
from tokenswift.kv.cache import FullCache  # noqa: E402
from tokenswift.kv.passes import Segment  # noqa: E402
from tokenswift.loader.families import FAMILIES as NATIVE_FAMILIES  # noqa: E402
from tokenswift.loader.rope import rotary_of  # noqa: E402
from tokenswift.models.decoder import NativeTarget  # noqa: E402
from tokenswift.models.target import make_target  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
BORDER = NEAR * CHUNK


def test_the_check_at_loading_passes() -> None:
    backend = open_backend(CUDA)
    assert isinstance(backend, CudaBackend), backend
    assert backend.equal_bits
    assert backend.records
    backend.records = False
    for kind in kinds():
        assert fault(backend, kind.dtype, kind.width) is None
    assert unrecorded(backend) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_keep_their_bits(dtype: torch.dtype) -> None:
    """At least at one count of rows; at which is printed."""
    set_blas_flags()
    for outputs, inner in ((6144, 4096), (4096, 14336), (128_256, 4096), (960, 576), (48, 64)):
        counts = counts_that_keep_bits(cublas, random(outputs, inner, dtype=dtype).to(CUDA))
        print(f"{dtype}, {outputs} x {inner}: rows keep their bits at {counts}")
        assert counts


def on_card(text: Segment) -> Segment:
    text.cache.data = text.cache.data.to(CUDA)
    return text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads,kv_heads,width", [(32, 8, 128), (9, 3, 64), (8, 8, 80), (14, 2, 96), (8, 4, 256)]
)
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> None:
    shape = shape_of(heads, kv_heads, width, dtype)
    for before, rows, reach, window in (
        (0, 1, None, 0),
        (CHUNK - 3, 17, 2, 0),
        (BORDER + FAR + 5, 64, 9, 0),
        (BORDER + 77, 16, 3, 4000),
        (3000, 100, 3, 0),
    ):
        parents = None if reach is None else tree(rows, reach)
        text = segment(before, rows, parents, kv_heads, width, dtype)
        query = random(rows, heads, width, seed=1, dtype=dtype)
        expected = by_torch(text, query, shape, window).float()
        batch = batch_of([on_card(text)], shape, CUDA)
        attended = Kernels(CUDA).attend(batch, query.to(CUDA), 0, shape, window).cpu().float()
        torch.testing.assert_close(attended, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", [5, 2 * CHUNK - 3, BORDER - 9, 100_000])
def test_one_row_has_its_bits_among_16_and_64(dtype: torch.dtype, before: int) -> None:
    tail = 64
    shape = shape_of(heads=32, kv_heads=8, width=128, dtype=dtype)
    cache = on_card(segment(before, tail, None, shape.kv_heads, shape.width, dtype)).cache
    assert isinstance(cache, FullCache)
    query = random(tail, shape.heads, shape.width, seed=1, dtype=dtype).to(CUDA)
    kernels = Kernels(CUDA)

    def run(first: int, rows: int, parents: list[int] | None = None) -> Tensor:
        numbers = torch.arange(rows)
        cache._length = before + first
        batch = batch_of([Segment(numbers, numbers, cache, parents)], shape, CUDA)
        return kernels.attend(batch, query[first : first + rows].contiguous(), 0, shape, 0)

    alone = torch.cat([run(row, 1) for row in range(tail)])
    for rows in (16, 64):
        assert torch.equal(run(0, rows), alone[:rows])
        assert torch.equal(run(0, rows, list(range(-1, rows - 1))), alone[:rows])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_native_decoder_is_the_models_own_forward(family: str, dtype: torch.dtype) -> None:
    """Mixtures run through transformers' forward, models with a state through torch."""
    target = make_target(tiny_model(family).to(CUDA, dtype))
    kind = NATIVE_FAMILIES[target.config.model_type]
    assert isinstance(target, NativeTarget) == (kind.experts is None or bool(kind.recurrent))
    assert target.backend.name == ("torch" if kind.recurrent else "cuda")
    if kind.experts is None and not kind.recurrent:
        assert target.equal_bits


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_that_is_read_is_near_one_that_is_decoded(family: str) -> None:
    """By torch's attention and by the kernels, windows included."""
    target = make_target(tiny_model(family).to(CUDA, torch.bfloat16))
    tokens = torch.arange(200) % 90
    positions = torch.arange(200)
    chain = list(range(-1, 199))
    prefilled = target.forward(tokens, positions, target.new_cache(200)).hidden
    decoded = target.forward(tokens, positions, target.new_cache(200), chain).hidden
    assert float((prefilled - decoded).norm() / decoded.norm()) < 3e-2


def test_a_pass_that_was_recorded_early_serves_144k() -> None:
    """Passes recorded as a text grows: the states of passes that are not recorded, byte by byte,
    one row and a tree, with few graphs."""
    backend = open_backend(CUDA)
    assert isinstance(backend, CudaBackend), backend
    assert backend.records
    model = tiny_model(
        "llama",
        max_position_embeddings=1 << 18,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
    ).to(CUDA, torch.bfloat16)
    target = NativeTarget(model, backend, rotary_of(model))
    cache = target.new_cache(147_456)
    cache.data.normal_()
    parents = [-1, 0, 0, 1, 3]
    for length in (5, 4000, 4097, 20_000, 140_000, 144_000):
        cache.commit(tuple(range(length - cache.length)))
        for paths, depths in (([-1], [0]), (parents, [0, 1, 1, 2, 3])):
            positions = torch.tensor(depths) + length
            tokens = torch.arange(3, 3 + len(positions))
            segments = [Segment(tokens, positions, cache, paths)]
            recorded = target.forward_all(segments)[0]
            backend.records = False
            eager = target.forward_all(segments)[0]
            backend.records = True
            assert torch.equal(recorded.hidden, eager.hidden)
            assert torch.equal(torch.as_tensor(recorded.queries), torch.as_tensor(eager.queries))
    assert isinstance(target.body, CudaBody)
    assert target.body.graphs.count <= 6
