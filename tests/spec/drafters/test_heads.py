"""Levels of draft heads, on their own."""

from __future__ import annotations

import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM
from tokenswift.spec.drafters.heads import HeadLevels


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
        rows = state
        for head in range(heads.count):
            rows, made = levels.level(head, state, rows, [5 + head])
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
