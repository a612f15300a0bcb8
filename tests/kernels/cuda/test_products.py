"""Which row counts products are computed at, and what becomes of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.cases import backend_on_cpu, random
from tokenswift.kernels.cuda.products import Product, counts_that_keep_bits
from tokenswift.kernels.formats import Q4_1, Stored


def exact(states: Tensor, weight: Tensor) -> Tensor:
    """A product whose rows have bits of their own: row by row."""
    return torch.stack([weight @ row for row in states.unbind()])


def by_count(states: Tensor, weight: Tensor) -> Tensor:
    """One that rounds differently for more than 16 rows."""
    return exact(states, weight) * (1 + (len(states) > 16) * 2.0**-20)


def by_place(states: Tensor, weight: Tensor) -> Tensor:
    out = exact(states, weight)
    out[5] += 1e-3
    return out


def by_neighbour(states: Tensor, weight: Tensor) -> Tensor:
    return exact(states, weight) + 1e-6 * states.sum()


@pytest.mark.parametrize(
    "library,counts", [(exact, (16, 64)), (by_count, (64,)), (by_place, ()), (by_neighbour, ())]
)
def test_products_have_row_counts_at_which_rows_keep_their_bits(
    library: Product, counts: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def counted(states: Tensor, weight: Tensor) -> Tensor:
        calls.append(len(states))
        return library(states, weight)

    weight = random(12, 32)
    states = random(3, 32, seed=4)
    bias = random(12, seed=5)
    assert counts_that_keep_bits(library, weight) == counts
    backend = backend_on_cpu(counted)
    packed = backend.pack(weight)
    probed = len(calls)
    backend.pack(random(12, 32, seed=1))  # of a shape that is known
    assert len(calls) == probed
    assert backend.equal_bits is bool(counts)
    warnings = ["do not keep rows' bits" in message for message in caplog.messages]
    assert warnings == [True] * (not counts)
    out = backend.linear(states, packed, bias)
    torch.testing.assert_close(out, states @ weight.T + bias, rtol=1e-2, atol=1e-2)
    assert calls[probed:] == [counts[0] if counts else 16]


def test_quantized_weights_become_floats() -> None:
    stored = Stored(Q4_1, Q4_1.encode(random(32, 64)))
    dense = random(5, 64, seed=1)
    backend = backend_on_cpu()
    packed = backend.pack([stored, dense], torch.bfloat16)
    expected = torch.cat((stored.decode(), dense)).bfloat16()
    assert not packed.stored
    assert torch.equal(packed.data, expected)
    ids = torch.tensor([36, 1])
    assert torch.equal(backend.take(packed, ids), expected[ids])
    assert not backend.keeps("q4_1", torch.bfloat16)
    assert not backend.has_int8_keys(64)
    states = random(130, 64, seed=2)  # more rows than a product takes
    torch.testing.assert_close(
        backend.linear(states, packed), states.bfloat16().float() @ expected.float().T
    )
