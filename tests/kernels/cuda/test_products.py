"""Weights of the CUDA backend, and the choice of its products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.cases import CPU, low, random
from tokenswift.kernels.cuda.products import SIZES, Products, keeps_bits, padded
from tokenswift.kernels.cuda.reference import Reference
from tokenswift.kernels.cuda.weights import CudaPacked
from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.formats.registry import FORMATS


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("columns", [32, 96, 128])
def test_planes_hold_the_weight_as_it_was(form: str, columns: int) -> None:
    stored = low(form, 9, columns)
    packed = CudaPacked(stored, torch.float32, CPU)
    assert packed.stored and torch.equal(packed.unpack(), stored.decode())
    ids = torch.tensor([8, 0, 3])
    assert torch.equal(packed.take(ids), stored.decode()[ids])
    groups = columns // 32 + columns // 32 % 2
    assert packed.nbytes == 9 * groups * {"q8_0": 34, "q4_0": 18, "q4_1": 20}[form]


def test_other_formats_become_dense() -> None:
    form = FORMATS["q4_k"]
    stored = Stored(form, torch.zeros(3, form.row_bytes(256), dtype=torch.uint8))
    packed = CudaPacked(stored, torch.bfloat16, CPU)
    assert not packed.stored and packed.data.dtype == torch.bfloat16


def test_a_weight_of_several_parts() -> None:
    stored, dense = low("q4_0", 32, 64), random(5, 64)
    packed = CudaPacked([stored, dense], torch.float32, CPU)
    whole = torch.cat((stored.decode(), dense))
    assert torch.equal(packed.unpack(), whole)
    assert torch.equal(packed.take(torch.tensor([36, 1])), whole[[36, 1]])
    states, bias = random(3, 64, seed=2), random(37, seed=3)
    found = Products(Reference(), None).linear(states, packed, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(states, whole, bias))


def exact(states: Tensor, weight: Tensor) -> Tensor:
    """A product whose rows have bits of their own: row by row."""
    return torch.stack([weight @ row for row in states.unbind()])


def by_count(states: Tensor, weight: Tensor) -> Tensor:
    """One that rounds differently for more than 64 rows."""
    return exact(states, weight) * (1 + (len(states) > 64) * 2.0**-20)


def by_place(states: Tensor, weight: Tensor) -> Tensor:
    found = exact(states, weight)
    found[5] += 1e-3
    return found


def by_neighbour(states: Tensor, weight: Tensor) -> Tensor:
    return exact(states, weight) + 1e-6 * states.sum()


@pytest.mark.parametrize(
    "library,kept", [(exact, True), (by_count, False), (by_place, False), (by_neighbour, False)]
)
def test_a_library_whose_rows_depend_on_others_is_left(library: Any, kept: bool) -> None:
    weight = random(12, 32)
    assert keeps_bits(library, weight) is kept
    asked: list[int] = []

    def counted(states: Tensor, weight: Tensor) -> Tensor:
        asked.append(len(states))
        return library(states, weight)

    products, packed, states = (
        Products(Reference(), counted),
        CudaPacked(weight, None, CPU),
        random(3, 32, seed=4),
    )
    products.linear(states, packed)
    probed = len(asked)
    found = products.linear(states, packed, random(12, seed=5))
    torch.testing.assert_close(found, states @ weight.T + random(12, seed=5))
    assert asked[probed:] == ([SIZES[0]] if kept else [])


def test_rows_are_padded_to_few_counts() -> None:
    seen: list[int] = []

    def library(states: Tensor, weight: Tensor) -> Tensor:
        seen.append(len(states))
        return states @ weight.T

    weight = random(4, 8)
    for rows in (1, 16, 17, 65, 1100):
        states = random(rows, 8, seed=1)
        torch.testing.assert_close(padded(library, states, weight), states @ weight.T)
    assert seen == [16, 16, 64, 512, 512, 512, 512]
