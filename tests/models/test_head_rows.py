"""Rows of the LM head for drafting are gathered once, whichever tensor names them."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.speculation.drafters.base import DraftVocabulary


def test_the_same_tokens_in_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card every text brings its own copy of the frequent ones."""
    target: object = LLM.from_model(tiny_model("llama"), heads=None).target
    gathered: list[int] = []
    gather = target._head_rows
    monkeypatch.setattr(
        target, "_head_rows", lambda ids: (gathered.append(len(ids)), gather(ids))[1]
    )
    frequent = torch.arange(20)
    hidden = torch.randn(2, 48)
    size = target.vocab_size
    logits = [
        DraftVocabulary(target, size, frequent.clone(), prompt).project(target.norm(hidden))
        for prompt in ([40], [41, 42], [3])
    ]
    assert gathered == [20, 1, 2]
    assert torch.equal(logits[0][:, :20], logits[2])
    other = DraftVocabulary(target, size, frequent + 1, [3]).project(
        target.norm(hidden)
    )  # as many, but others
    assert torch.equal(other[:, :19], logits[2][:, 1:])
