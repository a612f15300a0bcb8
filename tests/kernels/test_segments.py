"""Rows of several texts in one pass: each text's are what they are alone, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_model
from tests.tiny import VOCAB
from tokenswift.interfaces import Segment
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.structs import TYPES
from tokenswift.kernels.weights import LayerWeights, Shape, active_type
from tokenswift.kv.full import FullCache
from tokenswift.models.target import Target, make_target

HEADS, KV_HEADS, WIDTH, HIDDEN, INNER = 6, 2, 40, 64, 72
#: rows of each text (a tree where negative) and its committed keys
TEXTS = ((1, 0), (5, 3), (-7, 250), (40, 511), (-20, 258), (1, 700))


def parents_of(rows: int) -> list[int]:
    """Three children a node."""
    return [-1, *(row // 3 for row in range(rows - 1))]


class Layers:
    """Two random layers, of some types."""

    def __init__(self, backend: Backend, weights: torch.dtype, keys: torch.dtype) -> None:
        self.made = torch.Generator().manual_seed(5)
        self.backend, self.keys = backend, keys
        types = (weights, keys, active_type(weights))
        self.shape = Shape(2, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, *types, 1e-5, WIDTH**-0.5)

        def weight(rows: int, columns: int) -> Tensor:
            return (self.random(rows, columns) * columns**-0.5).to(weights)

        self.body = backend.body(
            self.shape,
            [
                LayerWeights(
                    qkv=backend.pack(weight((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN)),
                    out=backend.pack(weight(HIDDEN, HEADS * WIDTH)),
                    gate_up=backend.pack(weight(2 * INNER, HIDDEN)),
                    down=backend.pack(weight(HIDDEN, INNER)),
                    norm=torch.ones(HIDDEN),
                    mlp_norm=torch.ones(HIDDEN),
                    window=window,
                )
                for window in (0, 300)
            ],
        )

    def random(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.made) - 0.5

    def text(self, rows: int, before: int) -> tuple[Tensor, Segment, Tensor]:
        """States and angles of some rows, and where they belong."""
        parents, rows = (parents_of(-rows), -rows) if rows < 0 else (None, rows)
        cache = self.backend.new_cache(2, KV_HEADS, WIDTH, before + rows, self.keys)
        cache.data.copy_(self.random(*cache.data.shape))
        cache.commit(tuple(range(before)))
        numbers = torch.arange(rows)
        segment = Segment(numbers, numbers, cache, parents)
        return self.random(rows, HIDDEN), segment, self.random(rows, WIDTH // 2)

    def run(self, texts: Sequence[tuple[Tensor, Segment, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """By text: states, queries, keys and values of the pass."""
        states = torch.cat([text[0] for text in texts])
        angles = torch.cat([text[2] for text in texts])
        batch = self.backend.batch([text[1] for text in texts], self.body.shape)
        queries = self.backend.layers(self.body, states, angles.cos(), angles.sin(), batch)
        return [
            (one.hidden, torch.as_tensor(one.queries), data_of(text[1]))
            for text, one in zip(texts, batch.passes(states, queries), strict=True)
        ]


def data_of(segment: Segment) -> Tensor:
    return segment.cache.data.clone()


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_beside_other_texts_are_rows_alone(
    kernels: CpuBackend, dtype: torch.dtype, threads: int
) -> None:
    layers = Layers(CpuBackend(kernels._lib, threads), dtype, dtype)
    texts = [layers.text(*sizes) for sizes in TEXTS]
    alone = [layers.run([text])[0] for text in texts]
    for order in (range(len(texts)), reversed(range(len(texts))), (3, 0), (0, 5), (2, 4, 1)):
        chosen = list(order)
        together = layers.run([texts[i] for i in chosen])
        assert [same(found, alone[i]) for i, found in zip(chosen, together, strict=True)] == [True] * len(
            chosen
        )


def test_a_text_that_does_not_fit_its_cache_is_refused(kernels: CpuBackend) -> None:
    layers = Layers(kernels, torch.float32, torch.float32)
    fits, states = layers.text(2, 5), layers.random(3, HIDDEN)
    numbers = torch.arange(3)
    cache = FullCache(2, KV_HEADS, WIDTH, 2, torch.float32, torch.device("cpu"))
    full = (states, Segment(numbers, numbers, cache), layers.random(3, WIDTH // 2))
    with pytest.raises(ValueError, match="a pass of 3 rows over 0 keys needs more room than the cache's 2"):
        layers.run([fits, full])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
def test_a_models_pass_over_two_texts(family: str) -> None:
    """The native decoder's rows are those of two passes, bit for bit; transformers' run one by one."""
    target: Target = make_target(tiny_model(family))
    made = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (60,), generator=made)

    def segments() -> list[Segment]:
        found: list[Segment] = []
        for start, rows, parents in ((0, 30, None), (20, 7, parents_of(7))):
            cache = target.new_cache(60)
            target.prefill(ids[: start + 1].tolist(), cache)
            positions = torch.arange(rows) if parents is None else torch.tensor([0, 1, 1, 1, 2, 2, 2])
            found.append(Segment(ids[:rows], positions + cache.length, cache, parents))
        return found

    alone = [target.forward(s.tokens, s.positions, s.cache, s.parents) for s in segments()]
    together = target.forward_all(segments())
    for one, other in zip(alone, together, strict=True):
        if target.numerics()["equal_bits"] or target.layout is None:
            assert torch.equal(one.hidden, other.hidden)
        assert torch.allclose(one.hidden, other.hidden, atol=1e-4)
        assert len(one.queries) == len(other.queries) == target.layers
