"""The CUDA backend's kernels on a card (marker ``gpu``; run by bench/gpu.sh), in order of value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.cuda.cases import low, random, segment, tree  # noqa: E402
from tests.tiny import FAMILIES, tiny_model  # noqa: E402
from tokenswift.interfaces import Segment  # noqa: E402
from tokenswift.kernels.cuda.check import fault, int8_fault, started  # noqa: E402
from tokenswift.kernels.cuda.entries import IntFullCache  # noqa: E402
from tokenswift.kernels.cuda.int_reference import entries_of  # noqa: E402
from tokenswift.kernels.cuda.launch import Kernels  # noqa: E402
from tokenswift.kernels.cuda.plan import CHUNK, SPAN, plan_of  # noqa: E402
from tokenswift.kernels.cuda.products import cublas, keeps_bits, settle  # noqa: E402
from tokenswift.kernels.cuda.reference import Reference  # noqa: E402
from tokenswift.kernels.cuda.weights import Planes  # noqa: E402
from tokenswift.loader.rope import rotary_of  # noqa: E402
from tokenswift.models.decoder import NativeTarget  # noqa: E402
from tokenswift.models.target import make_target  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NEAR = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}


def test_the_check_at_loading_passes() -> None:
    found = started(CUDA)
    assert not isinstance(found, str), found
    assert found.equal_bits and fault(found) is None
    assert found.int8_keys and int8_fault(found) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lean_decoder_is_the_models_own_forward(family: str, dtype: torch.dtype) -> None:
    target = make_target(tiny_model(family).to(CUDA, dtype))
    assert isinstance(target, NativeTarget) and target.backend.name == "cuda" and target.equal_bits


def on_card(text: Segment) -> Segment:
    text.cache.data = text.cache.data.to(CUDA)
    return text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads,kv_heads,width", [(32, 8, 128), (9, 3, 64), (8, 8, 80), (14, 2, 96), (8, 4, 256)]
)
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> None:
    for before, rows, reach, window, cap in (
        (0, 1, None, 0, None),
        (CHUNK - 3, 17, 2, 0, 30.0),
        (SPAN * CHUNK + 5, 64, 9, 0, None),
        (9 * SPAN * CHUNK + 77, 16, 3, 4000, None),
        (3000, 300, None, 0, None),
    ):
        parents = None if reach is None else tree(rows, reach)
        text = on_card(segment(before, rows, parents, kv_heads, width, dtype))
        query = random(rows, heads, width, seed=1, dtype=dtype).to(CUDA)
        plan, sinks = plan_of([text], heads, CUDA), random(heads, seed=9).to(CUDA)
        given: Any = (plan, query, 0, width**-0.5, window, cap, sinks)
        found, expected = (ops.attend(*given) for ops in (Kernels(CUDA), Reference()))
        torch.testing.assert_close(found, expected, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", [5, 2 * CHUNK - 3, 100_000])
def test_one_row_has_its_bits_among_16_and_64(dtype: torch.dtype, before: int) -> None:
    heads, kv_heads, width, tail = 32, 8, 128, 64
    whole = on_card(segment(before, tail, None, kv_heads, width, dtype))
    query = random(tail, heads, width, seed=1, dtype=dtype).to(CUDA)
    kernels = Kernels(CUDA)

    def run(first: int, rows: int, parents: list[int] | None = None) -> Tensor:
        numbers = torch.arange(rows)
        cache = whole.cache.fork(before + first + rows, before)  # type: ignore[attr-defined]
        cache.data[:, :, before:] = whole.cache.data[:, :, before : before + first + rows]
        cache.commit(tuple(range(first)))
        plan = plan_of([Segment(numbers, numbers, cache, parents)], heads, CUDA)
        return kernels.attend(plan, query[first : first + rows].contiguous(), 0, width**-0.5)

    alone = torch.cat([run(row, 1) for row in range(tail)])
    for rows in (16, 64):
        assert torch.equal(run(0, rows), alone[:rows])
        assert torch.equal(run(0, rows, list(range(-1, rows - 1))), alone[:rows])


def int_text(before: int, rows: int, parents: list[int] | None, kv_heads: int, width: int) -> Segment:
    """Rows over a cache in int8, on the card."""
    cache = IntFullCache(1, kv_heads, width, before + rows, CUDA)
    cache.data.copy_(entries_of(random(2, kv_heads, before + rows, width, seed=2)))
    cache.commit(tuple(range(before)))
    numbers = torch.arange(rows)
    return Segment(numbers, numbers, cache, parents)


@pytest.mark.parametrize("heads,kv_heads,width", [(32, 8, 128), (9, 3, 64), (14, 2, 96), (8, 4, 256)])
def test_attention_in_int8_has_the_bits_of_the_cpu(heads: int, kv_heads: int, width: int) -> None:
    """The reference on the CPU has those of the compiled kernels there."""
    for before, rows, reach, window in (
        (0, 1, None, 0),
        (CHUNK - 3, 17, 2, 0),
        (SPAN * CHUNK + 5, 64, 9, 300),
        (3000, 70, None, 0),
    ):
        parents = None if reach is None else tree(rows, reach)
        text, query = int_text(before, rows, parents, kv_heads, width), random(rows, heads, width, seed=1)
        found = Kernels(CUDA).attend(plan_of([text], heads, CUDA), query.to(CUDA), 0, width**-0.5, window)
        text.cache.data = text.cache.data.cpu()
        plan = plan_of([text], heads, torch.device("cpu"))
        assert torch.equal(found.cpu(), Reference().attend(plan, query, 0, width**-0.5, window))


@pytest.mark.parametrize("before", [2 * CHUNK - 3, 100_000])
def test_one_row_in_int8_has_its_bits_among_16_and_64(before: int) -> None:
    heads, kv_heads, width, tail = 32, 8, 128, 64
    whole, query = int_text(before, tail, None, kv_heads, width), random(tail, heads, width, seed=1).to(CUDA)
    kernels = Kernels(CUDA)

    def run(first: int, rows: int, parents: list[int] | None = None) -> Tensor:
        whole.cache._length = before + first  # type: ignore[attr-defined]
        numbers = torch.arange(rows)
        plan = plan_of([Segment(numbers, numbers, whole.cache, parents)], heads, CUDA)
        return kernels.attend(plan, query[first : first + rows].contiguous(), 0, width**-0.5)

    alone = torch.cat([run(row, 1) for row in range(tail)])
    for rows in (16, 64):
        assert torch.equal(run(0, rows), alone[:rows])
        assert torch.equal(run(0, rows, list(range(-1, rows - 1))), alone[:rows])


def test_keys_and_values_in_int8_are_written_as_on_the_cpu() -> None:
    heads, kv_heads, width, rows = 8, 2, 80, 20
    mixed, angles = random(2, rows, (heads + 2 * kv_heads) * width), random(rows, width // 2, seed=1)
    mixed *= 10 ** random(rows, 1, seed=3)
    found = []
    for device, ops in ((CUDA, Kernels(CUDA)), (torch.device("cpu"), Reference())):
        cache, numbers = IntFullCache(1, kv_heads, width, rows, device), torch.arange(rows)
        cache.clear()
        plan = plan_of([Segment(numbers, numbers, cache)], heads, device)
        mixed, cos, sin = mixed.to(device), angles.cos().to(device), angles.sin().to(device)
        query = ops.append(plan, mixed, cos, sin, 0, heads)
        found.append((query.cpu(), cache.data.cpu()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_keep_their_bits(dtype: torch.dtype) -> None:
    """The kernel's always; whether the vendor's do is printed, and decides which is used."""
    settle()
    for outputs, inner in ((6144, 4096), (4096, 14336), (960, 576)):
        weight = random(outputs, inner, dtype=dtype).to(CUDA)
        assert keeps_bits(lambda states, weight: Kernels(CUDA).product(states, weight, None)[0], weight)
        print(f"cuBLAS, {dtype}, {outputs} x {inner}: keeps bits {keeps_bits(cublas, weight)}")


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("whole", [False, True])
def test_products_with_weights_of_few_bits(form: str, whole: bool) -> None:
    planes = Planes.of(low(form, 500, 1056), CUDA)
    for rows in (1, 5, 16, 40):
        states = random(rows, 1056, seed=3).to(CUDA)
        found, expected = (
            ops.low_product(states, planes, None, whole)[0] for ops in (Kernels(CUDA), Reference())
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)
        alone = Kernels(CUDA).low_product(states[:1], planes, None, whole)[0]
        assert torch.equal(found[:1], alone)


def test_a_pass_that_was_recorded_early_serves_144k() -> None:
    """Recorded behind 5 keys, replayed over a text that has grown: the states of passes that are not
    recorded, byte by byte, one row and a tree."""
    backend = started(CUDA)
    assert not isinstance(backend, str), backend
    assert backend.graphs, "graphs do not work here"
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model("llama", max_position_embeddings=1 << 18, **sizes).to(CUDA, torch.bfloat16)
    target, cache = NativeTarget(model, backend, rotary_of(model)), None
    parents = [-1, 0, 0, 1, 3]
    for length in (5, 144_000):
        cache = target.new_cache(147_456) if cache is None else cache
        cache.data[:, :, :length] = random(*cache.data[:, :, :length].shape, seed=1).to(CUDA)
        cache.commit(tuple(range(length - cache.length)))
        for paths, depths in (([-1], [0]), (parents, [0, 1, 1, 2, 3])):
            at = torch.tensor(depths) + length
            segments = [Segment(torch.arange(3, 3 + len(at)), at, cache, paths)]
            recorded = target.forward_all(segments)[0]
            replays, target.replays = target.replays, None
            eager, target.replays = target.forward_all(segments)[0], replays
            assert torch.equal(recorded.hidden, eager.hidden)
            assert torch.equal(torch.as_tensor(recorded.queries), torch.as_tensor(eager.queries))
