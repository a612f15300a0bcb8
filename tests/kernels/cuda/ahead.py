"""Kernels compiled for cards that are not there, from the very arguments that they would be started with."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenswift.kernels.cuda.launch import Kernels

CARDS = (80, 90, 120)
ROOM = {80: 163, 90: 227, 120: 99}  # KiB of shared memory that a program may have
NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


class Ahead(Kernels):
    """Compiles what it is asked to run, for a card's capability; runs nothing.

    Attributes:
        made: by kernel's name, what came out of each.
    """

    def __init__(self, card: int) -> None:
        super().__init__(torch.device("cpu"))
        self._room, self._generation = ROOM[card] << 10, card // 10
        self.target = GPUTarget("cuda", card, 32)
        self.made: dict[str, list[Any]] = {}

    def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
        source = ASTSource(kernel, *taken(kernel, given))
        found = triton.compile(source, target=self.target, options={"num_warps": warps, "num_stages": stages})
        self.made.setdefault(kernel.__name__, []).append(found)


def taken(
    kernel: Any, given: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[object]]]]:
    """What Triton compiles a kernel for, and so anew for each other: types, constants, and which numbers and
    addresses are multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], list[list[object]]] = {}
    for at, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = NAMES[value.dtype]
            aligned[(at,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and not parameter.do_not_specialize:
                if value == 1:
                    signature[parameter.name], constants[parameter.name] = "constexpr", 1
                elif value % 16 == 0:
                    aligned[(at,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned
