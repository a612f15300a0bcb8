"""Chains that a draft model takes part in, step after step, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.spec.drafters import reference
from tests.spec.drafters.plain import Text
from tests.spec.drafters.test_reference import (
    BUDGET,
    PROMPT,
    SAMPLINGS,
    SINKS,
    VOCAB,
    drafts,
    model_of,
)
from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.spec.drafters.model import ModelContext
from tokenswift.types import DraftTree


def small_model() -> Any:
    """Another model of the same vocabulary, but so like the target that some of its drafts are right."""
    model = tiny_model("llama", vocab_size=VOCAB)
    for number, parameter in enumerate(model.parameters()):
        parameter.data *= 1 + 0.1 * (number % 3)
    return model


def tokens_of(tree: DraftTree) -> list[int]:
    """The tokens of a chain, the root's first."""
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    assert set(tree.sources[1:]) <= {"chain"}
    return list(tree.tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_magicdec(sampling: str) -> None:
    """The draft model's cache is selected once; then what it ran itself replaces the least important."""
    params, gamma = SAMPLINGS[sampling], 3
    options = {"gamma": gamma, "kv": "snapkv", "budget": BUDGET, "sinks": SINKS, "draft_model": small_model()}
    held = reference.Held(reference.snapkv, BUDGET, SINKS, refresh=False)
    drafter = reference.Drafter(small_model(), held, PROMPT)
    rule = reference.ChoiceRule(params, VOCAB, coupled=True)
    lengths = []
    for tokens, tree in drafts(LLM.from_model(model_of()), "magicdec", options, params, 24):
        assert tokens_of(tree) == [tokens[-1], *drafter.chain(tokens, gamma, rule)]
        lengths.append(len(tokens))
    steps = {after - before for before, after in zip(lengths, lengths[1:], strict=False)}
    assert len(steps) > 2, "drafts should be accepted sometimes in part and sometimes in full"


@pytest.mark.parametrize("refresh", [0, 6])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_triforce(sampling: str, refresh: int) -> None:
    """Whatever the small model drafts, a chain is what the target would write over the retrieved cache."""
    params = SAMPLINGS[sampling]
    options = {"gamma": 4, "inner_gamma": 2, "chunk": 1, "refresh": refresh, "draft_model": small_model()}
    options |= {"budget": BUDGET, "sinks": SINKS, "draft_budget": 16}
    llm, rule = LLM.from_model(model_of()), reference.ChoiceRule(params, VOCAB, coupled=True)
    text = Text(llm.model)
    held = reference.Held(reference.single_chunks, BUDGET, SINKS, refresh=refresh > 0, every=refresh)
    for tokens, tree in drafts(llm, "triforce", options, params, 24):
        text.extend(tokens[:-1])
        seen = text.held(held.at(text, len(tokens) - 1))
        found = tokens_of(tree)
        assert 4 < len(found) < 8
        expected = reference.chain(text, tokens, len(tokens) - 1, seen, len(found) - 1, rule)
        assert found[1:] == expected


@pytest.mark.parametrize("lag", [3, 5, 20, 60])
def test_a_draft_model_that_caught_up_knows_the_text(lag: int) -> None:
    """Its logits are those of a model that read the text at once."""
    made = torch.Generator().manual_seed(lag)
    text = torch.randint(VOCAB, (30 + lag,), generator=made).tolist()
    model = LLM.from_model(small_model()).target
    rows = []
    for known in (30, len(text)):
        drafter = ModelContext(model, model.vocab_size, "streaming", 256, 4, 5)
        drafter.begin(text[:known])
        assert drafter.catch_up(text) == (known == 30)
        rows.append([drafter.row(text, path) for path in ((), (1,), (1, 2))])
    for late, whole in zip(*rows, strict=True):
        torch.testing.assert_close(late, whole, atol=1e-4, rtol=1e-4)
