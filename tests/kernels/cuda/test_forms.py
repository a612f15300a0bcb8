"""How many kernels are compiled for a model, and that all are when it is loaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.cuda.ahead import taken  # noqa: E402
from tests.kernels.cuda.test_backend import Unstarted  # noqa: E402
from tests.tiny import tiny_model  # noqa: E402
from tokenswift.interfaces import Segment  # noqa: E402
from tokenswift.kernels.cuda.backend import CudaBackend  # noqa: E402
from tokenswift.kernels.cuda.prepare import different  # noqa: E402
from tokenswift.loader.rope import rotary_of  # noqa: E402
from tokenswift.models.decoder import NativeTarget  # noqa: E402

META = torch.device("meta")
EIGHT = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "vocab_size": 1024,
}


class Forms(Unstarted):
    """Notes what would be compiled instead of starting it.

    Attributes:
        forms: each kernel's name and what it is compiled for.
        early: those of them that are compiled ahead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forms: set[tuple[str, str]] = set()
        self.early: set[tuple[str, str]] = set()
        self.fails = False

    @contextmanager
    def compiling(self) -> Iterator[None]:
        if self.fails:
            raise RuntimeError("no thread\nleft")
        before, self.forms = self.forms, set()
        yield
        self.early, self.forms = self.early | self.forms, before

    def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
        super().run(kernel, grid, warps, stages, **given)
        self.forms.add((kernel.__name__, repr((taken(kernel, given), warps, stages))))


def model_of(ops: Forms, prepares: bool, keys: torch.dtype | None = None) -> NativeTarget:
    """A model as wide as one of 8B weights, in bfloat16."""
    with META:
        shape: dict[str, Any] = EIGHT
        model = tiny_model("llama", **shape, num_attention_heads=32, num_key_value_heads=8)
    backend = CudaBackend(META, ops)
    backend.prepares = prepares
    target = NativeTarget(model.to(torch.bfloat16), backend, rotary_of(model))
    if keys is not None:
        target.take_keys(keys, "kv_cache_dtype")
    return target


def generate(target: NativeTarget) -> None:
    """A prompt of some passes, then a step of plain decoding and trees of up to 64 rows, behind texts of
    several lengths, with their logits."""
    target.prefill([5] * 2400, target.new_cache(2400))
    for before, rows in ((40, 1), (300, 5), (2100, 16), (5000, 17), (33_000, 64)):
        cache, numbers = target.new_cache(before + rows), torch.arange(rows)
        cache.commit(tuple(range(before)))
        parents = None if rows == 1 else [-1, *range(rows - 2), 0]
        (made,) = target.run([Segment(numbers, numbers + before, cache, parents)], True, target.body)
        target.logits(made.hidden)
        cache.commit((0, rows - 1) if rows < 60 else tuple(range(1, 60, 2)))


def test_a_generation_starts_few_kernels_of_different_forms() -> None:
    """By name: how many times Triton compiles each for all passes of a generation."""
    generate(model_of(ops := Forms(), prepares=False))
    assert not ops.early
    assert Counter(name for name, _ in ops.forms) == {
        "row_squares": 1,
        "turn_product": 1,
        "add_product": 1,
        "gate_product": 1,
        "product": 2,  # of the LM head, and of a prompt
        "add_norm": 2,  # of no parts, and of a prompt
        "turn_append": 1,
        "gated": 1,
        "attend_chunks": 1,
        "attend_merge": 1,
        "attend_rows": 1,
        "move_rows": 1,
    }


@pytest.mark.parametrize("keys", [None, torch.int8])
def test_what_a_generation_starts_was_compiled_at_load(keys: torch.dtype | None) -> None:
    ops = Forms()
    target = model_of(ops, True, keys)
    assert ops.early and not ops.forms
    generate(target)
    assert ops.forms and ops.forms <= ops.early


def test_a_compiler_without_threads_is_no_reason_to_give_up(caplog: pytest.LogCaptureFixture) -> None:
    ops = Forms()
    ops.fails = True
    with caplog.at_level(logging.WARNING, "tokenswift"):
        model_of(ops, True)
    assert caplog.messages == ["a model's kernels are compiled one after the other here (no thread left)"]
    assert ops.enough == Forms.enough


def test_layers_of_other_forms_are_prepared_too() -> None:
    """Two of each model, and one of each kind: here one that norms queries."""
    weights = model_of(Forms(), False).body.weights
    assert different(weights) == weights[:2]
    weights[2].query_norm = torch.ones(128, device=META)
    assert [id(layer) for layer in different(weights)] == [id(layer) for layer in weights]
