"""Which row counts the library's products are asked for, and what becomes of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.cases import random, standing
from tokenswift.kernels.cuda.products import sizes_that_keep
from tokenswift.kernels.formats import Q4_1, Stored


def exact(states: Tensor, weight: Tensor) -> Tensor:
    """A product whose rows have bits of their own: row by row."""
    return torch.stack([weight @ row for row in states.unbind()])


def by_count(states: Tensor, weight: Tensor) -> Tensor:
    """One that rounds differently for more than 16 rows."""
    return exact(states, weight) * (1 + (len(states) > 16) * 2.0**-20)


def by_place(states: Tensor, weight: Tensor) -> Tensor:
    found = exact(states, weight)
    found[5] += 1e-3
    return found


def by_neighbour(states: Tensor, weight: Tensor) -> Tensor:
    return exact(states, weight) + 1e-6 * states.sum()


@pytest.mark.parametrize(
    "library,sizes", [(exact, (16, 64)), (by_count, (64,)), (by_place, ()), (by_neighbour, ())]
)
def test_products_are_asked_for_the_row_counts_at_which_rows_keep_their_bits(
    library: Any, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def counted(states: Tensor, weight: Tensor) -> Tensor:
        asked.append(len(states))
        return library(states, weight)

    weight, states, bias = random(12, 32), random(3, 32, seed=4), random(12, seed=5)
    assert sizes_that_keep(library, weight) == sizes
    backend = standing(counted)
    packed = backend.pack(weight)
    probed = len(asked)
    backend.pack(random(12, 32, seed=1))  # of a shape that is known
    assert len(asked) == probed and backend.equal_bits is bool(sizes)
    assert ["do not keep rows' bits" in message for message in caplog.messages] == [True] * (
        not sizes
    )
    found = backend.linear(states, packed, bias)
    torch.testing.assert_close(found, states @ weight.T + bias, rtol=1e-2, atol=1e-2)
    assert asked[probed:] == [sizes[0] if sizes else 16]


def test_quantized_weights_become_floats() -> None:
    stored, dense = Stored(Q4_1, Q4_1.encode(random(32, 64))), random(5, 64, seed=1)
    backend = standing()
    packed = backend.pack([stored, dense], torch.bfloat16)
    whole = torch.cat((stored.decode(), dense)).bfloat16()
    assert not packed.stored and torch.equal(packed.data, whole)
    ids = torch.tensor([36, 1])
    assert torch.equal(backend.take(packed, ids), whole[ids])
    assert not backend.keeps("q4_1", torch.bfloat16) and not backend.has_int8_keys(64)
    states = random(130, 64, seed=2)  # more rows than a product takes
    torch.testing.assert_close(
        backend.linear(states, packed), states.bfloat16().float() @ whole.float().T
    )
