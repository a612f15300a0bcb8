"""Every kernel, compiled for cards that need not be there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.kernels.cuda.ahead import CARDS, ROOM, Ahead, registers  # noqa: E402
from tests.kernels.cuda.cases import CPU, low, plan, segment, tree  # noqa: E402
from tokenswift.interfaces import Segment  # noqa: E402
from tokenswift.kernels.cuda.entries import IntFullCache  # noqa: E402
from tokenswift.kernels.cuda.weights import CudaPacked, Planes  # noqa: E402
from tokenswift.kernels.weights import LayerWeights, Shape  # noqa: E402

HALF = (torch.bfloat16, torch.float16)
WIDTHS = (64, 80, 96, 128, 256)


def attention(card: int, width: int, dtype: torch.dtype, heads: int = 8, options: bool = False) -> Any:
    ahead = Ahead(card)
    text = segment(300, 5, tree(5, 2), 2, width, dtype)
    query = torch.empty(5, heads, width, dtype=dtype)
    more: Any = (64, 30.0, torch.zeros(heads)) if options else ()
    ahead.attend(plan([text], heads), query, 0, 0.1, *more)
    return ahead.made


@pytest.mark.parametrize("card", CARDS)
def test_attention(card: int) -> None:
    """Keys are fetched 16 bytes at a time and no product is contracted with a sum; sm_90 has its own dot."""
    made = attention(card, 128, torch.bfloat16)
    (chunks,) = made["attend_chunks"]
    code = chunks.asm["ptx"]
    assert "cp.async.cg" in code and "ld.global.b16" not in code
    assert ("wgmma" if card == 90 else "mma.sync") in code
    assert chunks.metadata.shared <= ROOM[card] << 10
    for kernel in (chunks, *made["attend_merge"]):
        assert "fma.rn.f32" not in kernel.asm["ptx"]


@pytest.mark.parametrize("card", CARDS)
def test_rows_of_a_prompt(card: int, tmp_path: Path) -> None:
    """The loop over tiles is that of spans: asynchronous fetches, and the card's products; little is spilled,
    and that once a span (sm_90's machine code was looked at)."""
    ahead, text = Ahead(card), segment(300, 300, None, 8, 128, torch.bfloat16)
    ahead.attend(plan([text], 32), torch.empty(300, 32, 128, dtype=torch.bfloat16), 0, 0.1)
    assert list(ahead.made) == ["attend_rows"]
    (rows,) = ahead.made["attend_rows"]
    spans = attention(card, 128, torch.bfloat16)["attend_chunks"][0].asm["ptx"]
    for what in ("cp.async.cg", "wgmma.mma_async", "mma.sync"):
        assert rows.asm["ptx"].count(what) == spans.count(what)
    assert "fma.rn.f32" not in rows.asm["ptx"] and rows.metadata.shared <= ROOM[card] << 10
    assert registers(rows, card, tmp_path)[1] <= 256


@pytest.mark.parametrize("card", [80, 90])
def test_a_processor_has_room_for_several_programs(card: int, tmp_path: Path) -> None:
    """What one waits for another hides: of its 65,536 registers, and of shared memory; little is spilled."""
    made = attention(card, 128, torch.bfloat16)
    made |= compiled_products(card, (torch.bfloat16,), ("q4_0",)).made
    for name, least in (("attend_chunks", 2 if card == 90 else 1), ("product", 3), ("low_product", 4)):
        kernel = made[name][0]
        used, spilled = registers(kernel, card, tmp_path)
        threads = 32 * kernel.metadata.num_warps
        shared = kernel.metadata.shared + 1024
        assert spilled <= 16 and min(65_536 // (used * threads), (ROOM[card] << 10) // shared) >= least, name


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", [2, 14])
def test_attention_of_all_shapes(card: int, dtype: torch.dtype, width: int, heads: int) -> None:
    for options in (False, True) if dtype in HALF else (True,):
        (chunks,) = attention(card, width, dtype, heads, options)["attend_chunks"]
        assert chunks.metadata.shared <= ROOM[card] << 10


@pytest.mark.parametrize("card", CARDS)
def test_rows_of_states(card: int) -> None:
    ahead, dtype, heads, width = Ahead(card), torch.bfloat16, 4, 80
    text = segment(3, 2, None, 2, width, dtype)
    weight, states = torch.ones(576), torch.zeros(2, 576)
    ahead.norm(states, weight, 1e-5, dtype)
    ahead.norm(states, weight, 1e-5, dtype, states[None])
    ahead.gated(states[None], dtype)
    ahead.gated(states[None], dtype, gelu=True)
    ahead.move(text.cache.data, 0, [1, 2])
    mixed, cos = torch.zeros(1, 2, (heads + 4) * width), torch.zeros(2, width // 2)
    for norms in ((None, None), (weight[:width], weight[:width])):
        ahead.append(plan([text], heads), mixed, cos, cos, 0, heads, 1e-5, *norms)
    assert {name: len(found) for name, found in ahead.made.items()} == {
        "add_norm": 2,
        "gated": 2,
        "move_rows": 1,
        "turn_append": 2,
    }
    for found in ahead.made.values():
        assert all("fma.rn.f32" not in kernel.asm["ptx"] for kernel in found)


def fused_layer(card: int, dtype: torch.dtype, parts: bool, rich: bool = True) -> Any:
    """The kernels of a layer in few launches, its sums in parts or in one."""
    ahead, (rows, heads, kv_heads, width, hidden, inner) = Ahead(card), (5, 2, 1, 128, 2048, 1280)
    ahead.split = 1024 if parts else 1 << 20
    sizes = ((heads + 2 * kv_heads) * width, hidden, 2 * inner, hidden)
    pairs = zip(sizes, (hidden, heads * width, hidden, inner), strict=True)
    packed = [CudaPacked(torch.zeros(n, k, dtype=dtype), None, CPU) for n, k in pairs]
    biases = [torch.zeros(size) if rich else None for size in sizes]
    norms = [torch.ones(width) if rich else None] * 2
    given: Any = (*packed, torch.ones(hidden), torch.ones(hidden), *biases, *norms)
    layer = LayerWeights(*given)
    shape = Shape(1, hidden, inner, heads, kv_heads, width, dtype, dtype, dtype, 1e-5, 0.1)
    states, turns = torch.zeros(rows, hidden), torch.zeros(rows, width // 2)
    squares = ahead.squares(states)
    made = plan([segment(3, rows, tree(rows, 2), kv_heads, width, dtype)], heads)
    query = ahead.turn_product(made, states, squares, layer, turns, turns, 0, shape)
    ahead.add_product(states, squares, query.flatten(1), layer.out.data, layer.out_bias)
    gated = ahead.gate_product(states, squares, layer.mlp_norm, 1e-5, layer.gate_up.data, layer.gate_up_bias)
    ahead.add_product(states, squares, gated, layer.down.data, layer.down_bias)
    return ahead.made


@pytest.mark.parametrize(
    "card,parts",
    [
        (90, True),
        *(pytest.param(card, parts, marks=pytest.mark.slow) for card in CARDS for parts in (True, False)),
    ],
)
def test_a_layer_in_few_launches(card: int, parts: bool, tmp_path: Path) -> None:
    """Who ends last sees what the others wrote; nothing is contracted, and little spilled."""
    made = fused_layer(card, torch.bfloat16, parts)
    assert {name: len(found) for name, found in made.items()} == {
        "row_squares": 1,
        "turn_product": 1,
        "add_product": 2,
        "gate_product": 1,
    }
    for found in made.values():
        for kernel in found:
            code = kernel.asm["ptx"]
            assert "fma.rn.f32" not in code and kernel.metadata.shared <= ROOM[card] << 10
            assert registers(kernel, card, tmp_path)[1] <= 96
            if found is not made["row_squares"]:
                assert ("wgmma" if card == 90 else "mma.sync") in code
                counted = parts and kernel is not made["add_product"][0]
                assert ("atom.global.gpu.acq_rel.add" in code) == counted


def compiled_products(card: int, dtypes: tuple[torch.dtype, ...], forms: tuple[str, ...]) -> Ahead:
    ahead, bias = Ahead(card), torch.zeros(64)
    for dtype in dtypes:
        states = torch.zeros(3, 576, dtype=dtype)
        ahead.product(states, torch.zeros(64, 576, dtype=dtype), bias)
        for form in forms:
            planes = Planes.of(low(form, 64, 576), CPU)
            ahead.low_product(states, planes, bias, whole=False)
            ahead.low_product(states.float(), planes, None, whole=True)
    return ahead


@pytest.mark.parametrize("card", CARDS)
def test_products(card: int) -> None:
    """Rows as whole numbers meet the card's product of such, and nothing is fetched number by number."""
    made = compiled_products(card, (torch.bfloat16,), ("q4_1",)).made
    (dense,), (floats, whole) = made["product"], made["low_product"]
    assert ("wgmma" if card == 90 else "mma.sync") in dense.asm["ptx"]
    assert "cp.async.cg" in dense.asm["ptx"]
    assert "bf16.bf16" in floats.asm["ptx"] and "s32.s8.s8.s32" in whole.asm["ptx"]
    for kernel in (dense, floats, whole, *made["to_whole"]):
        assert "fma.rn.f32" not in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_products_of_all_types(card: int) -> None:
    made = compiled_products(card, (*HALF, torch.float32), ("q8_0", "q4_0", "q4_1")).made
    assert [len(made[name]) for name in ("product", "low_product", "to_whole")] == [3, 18, 9]


def whole_attention(card: int, width: int, heads: int = 8) -> Any:
    """The kernels of keys and values in int8."""
    ahead, cache = Ahead(card), IntFullCache(1, 2, width, 320, CPU)
    cache.commit(tuple(range(300)))
    numbers = torch.arange(5)
    made = plan([Segment(numbers, numbers, cache, tree(5, 2))], heads)
    ahead.attend(made, torch.empty(5, heads, width), 0, 0.1, 64)
    mixed, cos, norm = torch.zeros(4, 5, (heads + 4) * width), torch.zeros(5, width // 2), torch.ones(width)
    for norms in ((None, None), (norm, norm)):
        ahead.append(made, mixed, cos, cos, 0, heads, 1e-5, *norms)
    ahead.move(cache.data, 0, [1, 2])
    return ahead.made


@pytest.mark.parametrize("card", CARDS)
def test_keys_and_values_in_int8(card: int) -> None:
    """Whole numbers meet the card's product of such, 16 bytes are fetched at a time, and steps are fused
    where the kernels say so and nowhere else."""
    made = whole_attention(card, 128)
    (chunks,), (merge,) = made["attend_whole_chunks"], made["merge_whole_chunks"]
    code = chunks.asm["ptx"]
    assert "s32.s8.s8" in code and "ld.global.b8" not in code and "ld.global.v4" in code
    assert ("wgmma" if card == 90 else "mma.sync") in code
    assert chunks.metadata.shared <= 99 * 1024
    for kernel in (chunks, merge):
        fused = kernel.asm["ttir"].count("math.fma")
        assert fused and "fma.rn.f32" in kernel.asm["ptx"]
        assert kernel.asm["llir"].count("@llvm.fma") >= fused and "contract" not in kernel.asm["llir"]
    for kernel in (*made["whole_queries"], *made["turn_append_whole"], *made["move_rows"]):
        assert "fma.rn" not in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("width", (4, 20, *WIDTHS))
@pytest.mark.parametrize("heads", [2, 14])
def test_keys_and_values_in_int8_of_all_shapes(card: int, width: int, heads: int) -> None:
    (chunks,) = whole_attention(card, width, heads)["attend_whole_chunks"]
    assert chunks.metadata.shared <= 99 * 1024
