"""Acceptance on trees written by hand: which nodes are kept, which rows are looked at, and
determinism."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import add_levels
from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.accept import accept_exact
from tokenswift.speculation.rivals.published import accept_published, published_paths
from tokenswift.tree import CandidateTree
from tokenswift.types import Accepted, DraftTree, RunError

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)


def example() -> DraftTree:
    """0:9 → 1:1 → 2:2 → 3:3, and branches 4:5 below node 1, 5:7 below the root."""
    builder = CandidateTree(9)
    builder.add_path([1, 2, 3], "head")
    builder.add_path([1, 5])
    builder.add_path([7])
    return builder.build()


def answers(tokens: list[int], width: int = 10) -> Tensor:
    """Logits whose argmax at node i is tokens[i]."""
    logits = torch.zeros(len(tokens), width)
    logits[torch.arange(len(tokens)), tokens] = 20.0
    return logits


CASES = [
    ([4, 0, 0, 0, 0, 0], Accepted((0,), 4)),  # nothing matches: the recovered token
    ([1, 8, 0, 0, 0, 0], Accepted((0, 1), 8)),
    ([1, 5, 0, 0, 6, 0], Accepted((0, 1, 4), 6)),  # a branch, then its bonus token
    ([1, 2, 3, 0, 0, 0], Accepted((0, 1, 2, 3), 0)),
    ([7, 2, 3, 0, 0, 8], Accepted((0, 5), 8)),
]


@pytest.mark.parametrize("tokens, expected", CASES)
def test_greedy_walk(tokens: list[int], expected: Accepted) -> None:
    sampler = Sampler(GREEDY, 10)
    for all_rows in (False, True):
        assert accept_exact(example(), answers(tokens), [3, 9], sampler, all_rows) == expected
    assert accept_published(example(), answers(tokens), [3, 9], sampler) == expected


@pytest.mark.parametrize("seed", range(40))
def test_all_rows_equals_the_lazy_walk(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = example()
    logits = torch.randn(len(tree), 10, generator=generator)
    logits[:, [1, 2, 3, 5, 7]] += 1.0
    params = SamplingParams(seed=seed, penalty_window=2, repetition_penalty=1.5, min_p=0.05)
    lazy = accept_exact(tree, logits, [1, 2, 9], Sampler(params, 10))
    assert accept_exact(tree, logits, [1, 2, 9], Sampler(params, 10), all_rows=True) == lazy
    perturbed = Sampler(params, 10).perturbed(
        logits, [1, 2, 9], [[tree.tokens[i] for i in tree.path(n)] for n in range(len(tree))]
    )
    assert lazy.token == int(perturbed[lazy.nodes[-1]].argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{"greedy": True}, {"min_p": 0.0}, {"min_p": 0.1}])
def test_only_rows_of_the_walk_are_checked(params: dict[str, Any], bad: float) -> None:
    """A rejected branch may hold anything; a row that a choice is made from may not."""
    tree = example()
    logits = answers([1, 8, 0, 0, 0, 0]) * 100
    logits[2:] = bad
    sampler = Sampler(SamplingParams(repetition_penalty=1.0, **params), 10)
    rules = (
        lambda: accept_exact(tree, logits, [9], sampler),
        lambda: accept_exact(tree, logits, [9], sampler, all_rows=True),
        lambda: accept_published(tree, logits, [9], sampler),
    )
    for rule in rules:
        assert rule() == Accepted((0, 1), 8)
    logits[1] = bad
    for rule in rules:
        with pytest.raises(RunError, match="position 2 hold (NaN|no finite maximum)"):
            rule()


def test_tokens_ahead_of_the_text_count_like_text() -> None:
    """``history`` and ``ahead`` are one context: the same window, the same noise."""
    tree = example()
    logits = torch.randn(len(tree), 10, generator=torch.Generator().manual_seed(1))
    for seed, all_rows in itertools.product(range(20), (False, True)):
        sampler = Sampler(
            SamplingParams(seed=seed, penalty_window=3, repetition_penalty=3.0, min_p=0.0), 10
        )
        as_text = accept_exact(tree, logits, [4, 1, 2, 9], sampler, all_rows)
        assert accept_exact(tree, logits, [4, 1], sampler, all_rows, ahead=[2, 9]) == as_text


def test_the_window_slides_in_the_exact_rule_and_not_in_the_published_one() -> None:
    """Token 1 is worth 5, token 2 is worth 3; θ = 2. After drafting 1, only a sliding window
    penalises it."""
    builder = CandidateTree(0)
    builder.add_path([1, 1])
    tree = builder.build()
    logits = torch.tensor([[0.0, 5.0, 3.0]]).repeat(3, 1)
    sampler = Sampler(SamplingParams(greedy=True, repetition_penalty=2.0, penalty_window=1), 3)
    assert accept_exact(tree, logits, [0], sampler) == Accepted((0, 1), 2)
    assert accept_published(tree, logits, [0], sampler) == Accepted((0, 1, 2), 1)


def test_published_paths_stand_in_the_published_order() -> None:
    """The tree's leaves, the deepest and worst ranked first; then the branches in the order of
    retrieval."""
    builder = CandidateTree(9)
    add_levels(builder, [[1], [4, 2], [5, 3]])
    builder.add_path([1, 7, 8])
    builder.add_path([1, 4])
    builder.add_path([1, 2, 3])
    tree = builder.build()
    tokens = [[tree.tokens[node] for node in path] for path in published_paths(tree)]
    assert tokens == [
        [9, 1, 2, 3],
        [9, 1, 2, 5],
        [9, 1, 4, 3],
        [9, 1, 4, 5],
        [9, 1, 7, 8],
        [9, 1, 4],
        [9, 1, 2, 3],
    ]
    assert published_paths(CandidateTree(9).build()) == [[0]]
    uneven = CandidateTree(9)
    for tokens in ([2, 3], [1]):
        uneven.add_path(tokens, "head")
    uneven.add_path([4])
    assert published_paths(uneven.build()) == [[0, 1, 2], [0, 3], [0, 4]]
    for source in ("ngram", "head"):
        alone = CandidateTree(9)
        alone.add_path([4], source)
        assert published_paths(alone.build()) == [[0, 1]]


def test_the_draws_of_the_published_rule_are_pinned() -> None:
    builder = CandidateTree(9)
    for tokens in ([1, 2], [1, 3], [2, 2], [1, 2]):
        builder.add_path(tokens)
    tree = builder.build()
    sampler = Sampler(SamplingParams(seed=8, min_p=0.0, repetition_penalty=1.0), 4)
    logits = torch.linspace(0, 33, 4 * len(tree)).sin().view(-1, 4)
    drawn = [accept_published(tree, logits, [9] * length, sampler) for length in range(1, 17)]
    assert [(accepted.nodes[-1], accepted.token) for accepted in drawn] == [
        (1, 1),
        (2, 2),
        (2, 1),
        (1, 1),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 3),
        (2, 3),
        (1, 3),
        (2, 2),
        (2, 0),
        (1, 0),
        (1, 2),
        (1, 1),
        (1, 1),
    ]
