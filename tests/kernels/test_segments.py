"""Rows of several texts in one pass: each text's are what they are alone, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_model
from tests.tiny import VOCAB
from tokenswift.engine.source import open_model
from tokenswift.interfaces import Segment
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu.arguments import TYPES
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.torch import TorchBackend
from tokenswift.kernels.weights import LayerWeights, Shape, active_type
from tokenswift.kv.full import FullCache
from tokenswift.load_config import LoadConfig
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


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("keys", TYPES)
def test_keys_have_a_type_of_their_own(kernels: CpuBackend, weights: torch.dtype, keys: torch.dtype) -> None:
    ours, reference = (Layers(backend, weights, keys) for backend in (kernels, TorchBackend()))
    for sizes in TEXTS[1:4]:
        (found, queries, data), (states, expected, rows) = (
            layers.run([layers.text(*sizes)])[0] for layers in (ours, reference)
        )
        assert data.dtype == rows.dtype == keys
        assert queries.dtype == expected.dtype == active_type(keys)
        close = 2e-2 if torch.bfloat16 in (weights, keys) else 2e-3
        assert float((found - states).norm() / states.norm()) < close
        assert float((queries.float() - expected.float()).norm() / expected.float().norm()) < close


def test_activations_of_a_type_that_products_do_not_take(kernels: CpuBackend) -> None:
    shape = Shape(1, 64, 64, 2, 2, 32, torch.bfloat16, torch.bfloat16, torch.float32, 1e-5, 1.0)
    with pytest.raises(ValueError, match="activations are torch.float32; valid with"):
        kernels.body(shape, [])


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


@pytest.mark.parametrize(
    "dtype,form",
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "q8_0"), (torch.bfloat16, "q4_1")],
)
def test_logits_of_several_texts_in_one_pass(
    tiny_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    form: str | None,
) -> None:
    """Hidden states and logits are those of each text alone, by one call of the kernels for all rows."""
    name = str(dtype).removeprefix("torch.")
    source = open_model(str(tiny_folder()), LoadConfig(name, "cpu", weights=form or "stored"))
    target = source.target(None)
    if not target.equal_bits:
        pytest.skip("no C compiler here")
    made = torch.Generator().manual_seed(3)
    calls: list[tuple[int, int]] = []
    layers = type(target.backend).layers

    def counted(self: Backend, body: object, states: Tensor, *rest: Any) -> Any:
        calls.append((len(states), len(rest[2].segments)))
        return layers(self, body, states, *rest)

    ids = torch.randint(VOCAB, (200,), generator=made)
    segments: list[Segment] = []
    for before, rows in ((1, 1), (90, -20), (17, 5), (64, 1), (130, -7), (3, 40)):
        cache = target.new_cache(before + abs(rows))
        target.prefill(ids[:before].tolist(), cache)
        parents = parents_of(-rows) if rows < 0 else list(range(-1, rows - 1))
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        positions = torch.tensor(depths) + before
        segments.append(Segment(ids[: len(parents)], positions, cache, parents if rows < 0 else None))
    alone = [target.forward(s.tokens, s.positions, s.cache, s.parents).hidden for s in segments]
    monkeypatch.setattr(type(target.backend), "layers", counted)
    together = [one.hidden for one in target.forward_all(segments)]
    assert calls == [(74, 6)]
    sizes = [len(s.tokens) for s in segments]
    logits = target.logits(torch.cat(together)).split(sizes)
    for one, other, found in zip(alone, together, logits, strict=True):
        assert torch.equal(one, other) and torch.equal(target.logits(one), found)
