"""Levels of draft heads, on their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.spec.drafters.heads import HeadLevels
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.spec.heads.packed import packed_steps


@pytest.mark.parametrize("kind", ["conditioned", "linear", "medusa"])
@torch.inference_mode()
def test_every_step_starts_from_its_own_state(kind: str) -> None:
    """What was made of the state before serves no other."""
    model = tiny_model("llama")
    width = model.config.hidden_size
    target, heads = LLM.from_model(model, heads="none").target, random_heads(kind, width, VOCAB)
    states = torch.randn(2, 1, width, generator=torch.Generator().manual_seed(3))

    def logits(levels: HeadLevels, state: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        rows = levels.start(state)
        for head in range(heads.count):
            rows, made = levels.level(head, rows, [5 + head])
            found.append(made)
        return found

    levels = HeadLevels(target, heads, frequent=False)
    levels.begin([0])
    seen: list[list[torch.Tensor]] = []
    for state in states:
        fresh = HeadLevels(target, heads, frequent=False)
        fresh.begin([0])
        seen.append(logits(levels, state))
        assert all(torch.equal(*pair) for pair in zip(seen[-1], logits(fresh, state), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(*seen, strict=True))


def levels_of(target: Any, heads: Heads, frequent: bool) -> list[torch.Tensor]:
    """Logits of two levels, three rows each."""
    levels = HeadLevels(target, heads, frequent)
    levels.begin([7, 8, 9])
    width = heads.config.hidden_size
    draw = torch.Generator().manual_seed(8)
    states, found = levels.start(torch.randn(1, width, generator=draw)).expand(3, -1), []
    for head in range(2):
        states, logits = levels.level(head, states, [5, 6, 7])
        assert logits.shape == (3, len(levels.subset.ids32) if levels.subset else VOCAB)
        found.append(logits)
    return found


@pytest.mark.parametrize("inner", [0, 96])
@pytest.mark.parametrize("frequent", [False, True])
@torch.inference_mode()
def test_a_level_in_one_call_is_what_its_modules_make(
    inner: int, frequent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of float32 up to rounding, of int8 up to that of whole numbers; in both far from another level's."""
    model = tiny_model("llama", hidden_size=96)
    target = LLM.from_model(model, heads="none").target
    if not isinstance(target.backend, CpuBackend):
        pytest.skip("no compiled kernels here")
    torch.manual_seed(5)
    config = HeadsConfig("conditioned", 2, model.config.hidden_size, VOCAB, inner=inner)
    heads = Heads(config).eval().requires_grad_(False)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    heads.frequent = torch.arange(40) if frequent else None
    with monkeypatch.context() as patch:
        patch.setattr("tokenswift.spec.drafters.heads.packed_steps", lambda *args: None)
        expected = levels_of(target, heads, frequent)
    floats = levels_of(target, heads, frequent)
    monkeypatch.setattr(target, "whole", True)
    target._rows = None
    monkeypatch.setattr(target, "project", lambda normed, rows=None: _projected(target, normed, rows))
    whole = levels_of(target, heads, frequent)
    for wanted, one, other in zip(expected, floats, whole, strict=True):
        assert (one - wanted).abs().max() < 1e-4 * wanted.std()
        assert not torch.equal(other, one)
        assert (other - wanted).abs().max() < 0.15 * wanted.std()
    assert (expected[1] - expected[0]).abs().max() > wanted.std()


def _projected(target: Any, normed: torch.Tensor, rows: Any) -> torch.Tensor:
    """The LM head of a target whose own weights are no int8, over rows that are."""
    return target.backend.draft_product(normed, target.head if rows is None else rows)


@torch.inference_mode()
def test_states_of_another_width_are_refused() -> None:
    """The kernels go by the heads' own width."""
    model = tiny_model("llama", hidden_size=96)
    target, heads = LLM.from_model(model, heads="none").target, random_heads("conditioned", 96, VOCAB)
    if not isinstance(target.backend, CpuBackend):
        pytest.skip("no compiled kernels here")
    steps = packed_steps(heads, target.backend, False)
    assert steps is not None
    given = torch.zeros(1, 48)
    with pytest.raises(ValueError, match="states is .* valid: .*96"):
        target.backend.draft_level(steps[0]._weights[0], given, given, given, [])
