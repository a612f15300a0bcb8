"""Our passes (prefill, step, tree) against transformers' eager logits, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import FAMILIES, VOCAB, tiny_model
from tokenswift.models.target import PREFILL_CHUNK, HFTarget
from tokenswift.tree import TreeBuilder
from tokenswift.types import InputError

TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def _text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _eager(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 37, PREFILL_CHUNK + 5])
def test_prefill_then_steps_equal_eager(family: str, length: int) -> None:
    model = tiny_model(family)
    target = HFTarget(model)
    tokens = _text(length + 4)
    expected = _eager(model, tokens)
    cache = target.new_cache(length + 10)
    result = target.prefill(tokens[:length], cache)
    assert cache.length == length
    torch.testing.assert_close(target.logits(result.hidden)[-1], expected[length - 1], **TOLERANCE)
    for i in range(length, length + 4):
        result = target.forward(torch.tensor([tokens[i]]), torch.tensor([i]), cache)
        torch.testing.assert_close(target.logits(result.hidden)[0], expected[i], **TOLERANCE)
        cache.commit((0,))


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_pass_equals_eager_on_every_branch_and_after_commit(family: str) -> None:
    model = tiny_model(family)
    target = HFTarget(model)
    text = _text(60)
    cache = target.new_cache(120)
    target.prefill(text[:-1], cache)
    builder = TreeBuilder(text[-1])
    builder.add_levels([[5], [6, 7, 8], [9, 10]])
    builder.add_path([5, 7, 30, 31])
    builder.add_path([40, 41])
    tree = builder.build(gamma=4)

    def run() -> torch.Tensor:
        positions = torch.tensor(tree.depths) + len(text) - 1
        return target.logits(target.forward(torch.tensor(tree.tokens), positions, cache, tree.parents).hidden)

    logits = run()
    for node in range(len(tree)):
        branch = text + [tree.tokens[i] for i in tree.path(node)]
        torch.testing.assert_close(logits[node], _eager(model, branch)[-1], **TOLERANCE)

    # Commit a path whose rows are not adjacent, then go on from it.
    nodes = (0, *tree.path(tree.tokens.index(31)))
    assert nodes != tuple(range(len(nodes)))
    cache.commit(nodes)
    grown = text + [5, 7, 30, 31]
    result = target.forward(torch.tensor([12]), torch.tensor([len(grown)]), cache)
    torch.testing.assert_close(target.logits(result.hidden)[0], _eager(model, [*grown, 12])[-1], **TOLERANCE)


def test_model_object_is_left_as_it_was() -> None:
    model = tiny_model("llama")
    before = _eager(model, [3, 4, 5])
    target = HFTarget(model)
    target.prefill([3, 4, 5], target.new_cache(8))
    assert model.config._attn_implementation == "eager"
    assert torch.equal(_eager(model, [3, 4, 5]), before)


def test_unknown_family_is_refused() -> None:
    class Config:
        model_type = "gpt2"

    class Model:
        config = Config()

    with pytest.raises(InputError, match="gpt2.*llama, qwen2, qwen3, mistral"):
        HFTarget(Model())
