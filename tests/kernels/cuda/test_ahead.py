"""Every kernel, compiled for cards that need not be there, from the arguments it would be started
with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from tokenswift.kernels.cuda.launch import Kernels, TritonKernel  # noqa: E402
from tokenswift.kernels.cuda.ops import Addend  # noqa: E402
from tokenswift.kernels.packed import Packed  # noqa: E402
from tokenswift.kernels.weights import LayerWeights  # noqa: E402

#: KiB of shared memory that a program may have, by a card's capability
SHARED_MEMORY = {80: 163, 90: 227, 120: 99}
NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
BF16 = torch.bfloat16


class Ahead(Kernels):
    """Compiles what it is to run, for a card's capability; runs nothing.

    Attributes:
        sources: by kernel's name, what it was to be compiled for; each is another binary.
        compiled: by kernel's name, the last of its binaries.
    """

    def __init__(self, card: int) -> None:
        super().__init__(torch.device("cpu"))
        self._shared_memory = SHARED_MEMORY[card] << 10
        self._generation = card // 10
        self.target = GPUTarget("cuda", card, 32)
        self.sources: dict[str, set[str]] = {}
        self.compiled: dict[str, Any] = {}

    def run(
        self,
        kernel: TritonKernel,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        **arguments: object,
    ) -> None:
        name = kernel.__name__
        source = source_of(kernel, arguments)
        known = self.sources.setdefault(name, set())
        text = str((source, warps, stages))
        if text in known:
            return
        known.add(text)
        options = {"num_warps": warps, "num_stages": stages}
        ast = ASTSource(kernel, source.signature, source.constants, source.aligned)
        self.compiled[name] = triton.compile(ast, target=self.target, options=options)

    def counts(self) -> dict[str, int]:
        """How many binaries each kernel has."""
        return {name: len(known) for name, known in self.sources.items()}


@dataclass
class Source:
    """What Triton compiles a kernel for, and so anew for each other.

    Attributes:
        signature: types of the arguments.
        constants: values of those that are constants.
        aligned: the arguments whose numbers or addresses are multiples of 16.
    """

    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    aligned: dict[tuple[int], list[list[object]]] = field(default_factory=dict)


def source_of(kernel: Any, arguments: Mapping[str, object]) -> Source:
    source = Source()
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        value = arguments[name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            source.signature[name] = "constexpr"
            source.constants[name] = value
            continue
        if isinstance(value, Tensor):
            source.signature[name] = NAMES[value.dtype]
        else:
            source.signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and special and value % 16 == 0):
            source.aligned[(index,)] = [["tt.divisibility", 16]]
    return source


def attention(
    card: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, cap: float = 0.0
) -> Any:
    """The kernel of attention, compiled for a card."""
    ahead = Ahead(card)
    shape = replace(shape_of(heads, kv_heads, width, dtype), cap=cap)
    batch = batch_of([segment(300, 5, tree(5, 2), kv_heads, width, dtype)], shape)
    ahead.attend(batch, torch.empty(5, heads, width, dtype=dtype), 0, shape, 0)
    return ahead.compiled["attend"]


@pytest.mark.parametrize("card", SHARED_MEMORY)
def test_attention_fetches_keys_ahead_with_the_cards_own_products(card: int) -> None:
    """16 bytes at a time; sm_90 has products of its own."""
    code = attention(card, 32, 8, 128, BF16).asm["ptx"]
    assert "cp.async.cg" in code
    assert ("wgmma" if card == 90 else "mma.sync") in code


@pytest.mark.parametrize(
    "width,dtype,cap",
    [
        (8, torch.float32, 0.0),
        (80, torch.float16, 0.0),
        (256, torch.float32, 0.0),
        (256, BF16, 50.0),
    ],
)
@pytest.mark.parametrize("card", SHARED_MEMORY)
def test_attention_fits_into_a_processor(
    card: int, width: int, dtype: torch.dtype, cap: float
) -> None:
    compiled = attention(card, 14, 2, width, dtype, cap)
    assert compiled.metadata.shared <= SHARED_MEMORY[card] << 10


def run_all(ahead: Ahead, before: int, rows: int, norm: bool, rope: int, number: int) -> None:
    """A pass's kernels: attention, norms with what a block adds, gates, and what is appended."""
    shape = shape_of(4, 2, 64, BF16)
    weight = torch.ones(256)
    states = torch.zeros(rows, 256)
    batch = batch_of([segment(before, rows, tree(rows, 2), 2, 64, BF16, layers=2)], shape)
    ahead.attend(batch, torch.empty(rows, 4, 64, dtype=BF16), number, shape, 16 * number)
    ahead.norm(states, weight, 1e-5, BF16, Addend(states))
    ahead.gated(states, BF16)
    unused = Packed(torch.zeros(2, 2))
    layer = LayerWeights(
        qkv=unused,
        out=unused,
        gate_up=unused,
        down=unused,
        norm=None,
        mlp_norm=weight,
        query_norm=weight[:64] if norm else None,
        key_norm=weight[:64] if norm else None,
        rope=rope,
    )
    angles = torch.zeros(rows, 32)
    ahead.append(batch, torch.zeros(rows, 8 * 64), angles, angles, number, layer, shape)


@pytest.mark.parametrize("card", SHARED_MEMORY)
def test_every_kernel_compiles_and_passes_differ_in_no_constant(card: int) -> None:
    """Bits of rows could differ between binaries."""
    ahead = Ahead(card)
    weight = torch.ones(576)
    states = torch.zeros(2, 576)
    for norm, rope in ((False, 0), (True, 0), (False, -1)):
        run_all(ahead, before=3, rows=2, norm=norm, rope=rope, number=0)
    ahead.norm(states, weight, 1e-5, BF16)
    ahead.norm(states, None, 1e-5, BF16, Addend(states, weight, 0.5))
    ahead.gated(states, BF16, True)
    expected = {"attend": 1, "merge": 1, "add_norm": 3, "gated": 2, "rotate_append": 3}
    assert ahead.counts() == expected
    for before, rows, number in ((0, 1, 0), (1, 1, 1), (300, 16, 1), (17_000, 64, 1), (4096, 5, 0)):
        run_all(ahead, before=before, rows=rows, norm=True, rope=0, number=number)
    assert ahead.counts() == expected
