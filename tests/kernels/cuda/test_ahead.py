"""Every kernel, compiled for cards that need not be there, from the arguments it would be started
with."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.kernels.cuda.cases import batch_of, segment, shape_of, tree  # noqa: E402
from tokenswift.kernels.cuda.launch import Kernels  # noqa: E402
from tokenswift.kernels.weights import LayerWeights, Packed  # noqa: E402

ROOM = {
    80: 163,
    90: 227,
    120: 99,
}  # KiB of shared memory that a program may have, by a card's capability
NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
BF16 = torch.bfloat16


class Ahead(Kernels):
    """Compiles what it is asked to run, for a card's capability; runs nothing.

    Attributes:
        asked: by kernel's name, what it was to be compiled for; each is another binary.
        made: by kernel's name, the last of them.
    """

    def __init__(self, card: int) -> None:
        super().__init__(torch.device("cpu"))
        self._room, self._generation = ROOM[card] << 10, card // 10
        self.target = GPUTarget("cuda", card, 32)
        self.asked: dict[str, set[str]] = {}
        self.made: dict[str, Any] = {}

    def run(
        self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any
    ) -> None:
        source, asked = taken(kernel, given), self.asked.setdefault(kernel.__name__, set())
        if (said := str((source, warps, stages))) not in asked:
            asked.add(said)
            how = {"num_warps": warps, "num_stages": stages}
            self.made[kernel.__name__] = triton.compile(
                ASTSource(kernel, *source), target=self.target, options=how
            )


def taken(
    kernel: Any, given: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """What Triton compiles a kernel for, and so anew for each other: types, constants, and which
    numbers and addresses are multiples of 16."""
    signature, constants, aligned = dict[str, str](), dict[str, Any](), dict[Any, Any]()
    for at, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = NAMES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (special and value % 16 == 0):
            aligned[(at,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def attention(
    card: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, cap: float = 0.0
) -> Any:
    ahead, shape = Ahead(card), replace(shape_of(heads, kv_heads, width, dtype), cap=cap)
    text = segment(300, 5, tree(5, 2), kv_heads, width, dtype)
    ahead.attend(batch_of([text], shape), torch.empty(5, heads, width, dtype=dtype), 0, shape, 0)
    return ahead.made["attend"]


@pytest.mark.parametrize("card", ROOM)
def test_attention(card: int) -> None:
    """Keys are fetched ahead, 16 bytes at a time; sm_90 has its own products; all fits into a
    processor."""
    code = attention(card, 32, 8, 128, BF16).asm["ptx"]
    assert "cp.async.cg" in code and ("wgmma" if card == 90 else "mma.sync") in code
    for width, dtype, cap in (
        (80, torch.float16, 0.0),
        (256, torch.float32, 0.0),
        (256, BF16, 50.0),
    ):
        assert attention(card, 14, 2, width, dtype, cap).metadata.shared <= ROOM[card] << 10


def rows_of_states(ahead: Ahead, before: int, rows: int, norm: bool, rope: int, layer: int) -> None:
    """A pass's other kernels: norms with and without what a block gave, gates, and what is
    appended."""
    shape, weight, states = shape_of(4, 2, 64, BF16), torch.ones(256), torch.zeros(rows, 256)
    batch = batch_of([segment(before, rows, tree(rows, 2), 2, 64, BF16, layers=2)], shape)
    ahead.attend(batch, torch.empty(rows, 4, 64, dtype=BF16), layer, shape, 16 * layer)
    ahead.norm(states, weight, 1e-5, BF16, states)
    ahead.gated(states, BF16)
    none: Any = Packed(torch.zeros(2, 2))
    norms: Any = {"query_norm": weight[:64], "key_norm": weight[:64]} if norm else {}
    made = LayerWeights(none, none, none, none, None, weight, rope=rope, **norms)
    cos, mixed = torch.zeros(rows, 32), torch.zeros(rows, 8 * 64)
    ahead.append(batch, mixed, cos, cos, layer, made, shape)


@pytest.mark.parametrize("card", ROOM)
def test_every_kernel_in_every_form(card: int) -> None:
    ahead, weight, states = Ahead(card), torch.ones(576), torch.zeros(2, 576)
    for norm, rope in ((False, 0), (True, 0), (False, -1)):
        rows_of_states(ahead, 3, 2, norm, rope, 0)
    ahead.norm(states, weight, 1e-5, BF16)
    ahead.norm(states, None, 1e-5, BF16, states, weight, 0.5)
    ahead.gated(states, BF16, True)
    counts = {name: len(found) for name, found in ahead.asked.items()}
    expected = {"attend": 1, "merge": 1, "add_norm": 3, "gated": 2, "turn_append": 3}
    assert counts == expected
    # bits of rows could differ between binaries: what differs between passes is no constant of one
    for before, rows, layer in ((0, 1, 0), (1, 1, 1), (300, 16, 1), (17_000, 64, 1), (4096, 5, 0)):
        rows_of_states(ahead, before, rows, True, 0, layer)
    assert {name: len(found) for name, found in ahead.asked.items()} == expected
