"""Every kernel, compiled for cards that need not be there."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.kernels.cuda.ahead import CARDS, ROOM, Ahead, taken  # noqa: E402
from tests.kernels.cuda.cases import batch_of, segment, shape_of, tree  # noqa: E402
from tokenswift.kernels.weights import LayerWeights, Packed  # noqa: E402


def attention(card: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, cap: float = 0.0) -> Any:
    ahead, shape = Ahead(card), replace(shape_of(heads, kv_heads, width, dtype), cap=cap)
    text = segment(300, 5, tree(5, 2), kv_heads, width, dtype)
    ahead.attend(batch_of([text], shape), torch.empty(5, heads, width, dtype=dtype), 0, shape, 0)
    return ahead.made["attend"][0]


@pytest.mark.parametrize("card", CARDS)
def test_attention(card: int) -> None:
    """Keys are fetched ahead, 16 bytes at a time; sm_90 has its own products; all fits into a processor."""
    attend = attention(card, 32, 8, 128, torch.bfloat16)
    code = attend.asm["ptx"]
    assert "cp.async.cg" in code and ("wgmma" if card == 90 else "mma.sync") in code
    for width, dtype, cap in (
        (80, torch.float16, 0.0),
        (256, torch.float32, 0.0),
        (256, torch.bfloat16, 50.0),
    ):
        assert attention(card, 14, 2, width, dtype, cap).metadata.shared <= ROOM[card] << 10


@pytest.mark.parametrize("card", CARDS)
def test_rows_of_states(card: int) -> None:
    ahead, dtype, heads, width = Ahead(card), torch.bfloat16, 4, 80
    shape, text = shape_of(heads, 2, width, dtype), segment(3, 2, None, 2, width, dtype)
    weight, states = torch.ones(576), torch.zeros(2, 576)
    ahead.norm(states, weight, 1e-5, dtype)
    ahead.norm(states, weight, 1e-5, dtype, states)
    ahead.norm(states, None, 1e-5, dtype, states, weight, 0.5)
    ahead.gated(states, dtype)
    ahead.gated(states, dtype, True)
    mixed, cos = torch.zeros(2, (heads + 4) * width), torch.zeros(2, width // 2)
    for norm, rope in ((None, 0), (weight[:width], 0), (None, -1)):
        none: Any = Packed(torch.zeros(2, 2))
        layer = LayerWeights(none, none, none, none, None, weight, query_norm=norm, key_norm=norm, rope=rope)
        ahead.append(batch_of([text], shape), mixed, cos, cos, 0, layer, shape)
    assert {name: len(found) for name, found in ahead.made.items()} == {
        "add_norm": 3,
        "gated": 2,
        "turn_append": 3,
    }


def test_one_binary_serves_texts_of_all_lengths_and_passes_of_all_sizes() -> None:
    """Bits of rows could differ between binaries: what differs between passes is no constant of one."""

    class Asked(Ahead):
        asked: dict[str, set[str]] = {}

        def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
            said = (taken(kernel, given), warps, stages)
            self.asked.setdefault(kernel.__name__, set()).add(str(said))

    ahead, shape = Asked(90), shape_of(4, 2, 64, torch.bfloat16)
    for before, rows, layer in ((0, 1, 0), (1, 1, 1), (300, 16, 1), (17_000, 64, 1), (4096, 5, 0)):
        text = segment(before, rows, tree(rows, 2), 2, 64, torch.bfloat16, layers=2)
        batch = batch_of([text], shape)
        ahead.attend(batch, torch.empty(rows, 4, 64, dtype=torch.bfloat16), layer, shape, 16 * layer)
        states = torch.zeros(rows, 256)
        ahead.norm(states, states[0], 1e-5, torch.bfloat16, states)
        ahead.gated(states, torch.bfloat16)
        norm, none = torch.ones(64), Packed(torch.zeros(2, 2))
        given: Any = (none, none, none, none, None, norm)
        made = LayerWeights(*given, query_norm=norm, key_norm=norm)
        cos = torch.zeros(rows, 32)
        ahead.append(batch, torch.zeros(rows, 8 * 64), cos, cos, layer, made, shape)
    assert {name: len(found) for name, found in ahead.asked.items()} == {
        "attend": 1,
        "merge": 1,
        "add_norm": 1,
        "gated": 1,
        "turn_append": 1,
    }
