"""Acceptance on hand-made trees: which nodes are kept, which rows are looked at, and determinism."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenswift.accept import accept_exact, accept_published
from tokenswift.config import SamplingParams
from tokenswift.sampling import Sampler
from tokenswift.tree import TreeBuilder
from tokenswift.types import Accepted, DraftTree, RunError

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)


def example() -> DraftTree:
    """0:9 → 1:1 → 2:2 → 3:3, and branches 4:5 below node 1, 5:7 below the root."""
    builder = TreeBuilder(9)
    builder.add_path([1, 2, 3], ngram=False)
    builder.add_path([1, 5])
    builder.add_path([7])
    return builder.build(3)


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


def test_the_lazy_walk_looks_only_at_its_own_rows() -> None:
    tree = example()
    logits = answers([1, 8, 0, 0, 0, 0])
    logits[2:] = math.nan
    sampler = Sampler(GREEDY, 10)
    assert accept_exact(tree, logits, [9], sampler) == Accepted((0, 1), 8)
    for rule in (
        lambda: accept_exact(tree, logits, [9], sampler, True),
        lambda: accept_published(tree, logits, [9], sampler),
    ):
        with pytest.raises(RunError, match="NaN"):
            rule()
    logits[1] = math.nan
    with pytest.raises(RunError, match="NaN"):
        accept_exact(tree, logits, [9], sampler)


def test_the_window_slides_in_the_exact_rule_and_not_in_the_published_one() -> None:
    """Token 1 is worth 5, token 2 is worth 3; θ = 2. After drafting 1, only a sliding window
    penalises it."""
    builder = TreeBuilder(0)
    builder.add_path([1, 1])
    tree = builder.build(2)
    logits = torch.tensor([[0.0, 5.0, 3.0]]).repeat(3, 1)
    sampler = Sampler(SamplingParams(greedy=True, repetition_penalty=2.0, penalty_window=1), 3)
    assert accept_exact(tree, logits, [0], sampler) == Accepted((0, 1), 2)
    assert accept_published(tree, logits, [0], sampler) == Accepted((0, 1, 2), 1)


def test_published_draws_are_keyed_by_seed_position_and_leaf() -> None:
    tree = example()
    logits = torch.zeros(len(tree), 10)

    def run(seed: int, length: int) -> Accepted:
        sampler = Sampler(SamplingParams(seed=seed, min_p=0.0, repetition_penalty=1.0), 10)
        return accept_published(tree, logits, [0] * (length - 1) + [9], sampler)

    assert run(3, 5) == run(3, 5)
    assert len({run(seed, 5) for seed in range(60)}) > 10
    assert len({run(3, length) for length in range(1, 60)}) > 10


def test_published_accepts_once_per_leaf() -> None:
    """Three leaves of equal tokens' probability 1/4 each below one certain token: independent draws
    per leaf give 1 - (3/4)^3 for a match, not 3/4 as one shared draw would."""
    builder = TreeBuilder(0)
    builder.add_levels([[1], [0, 1, 2]])
    tree = builder.build(2)
    logits = torch.zeros(len(tree), 4)
    logits[0, 1] = 1000.0
    depth = 0
    runs = 3000
    for seed in range(runs):
        sampler = Sampler(SamplingParams(seed=seed, min_p=0.0, repetition_penalty=1.0), 4)
        depth += len(accept_published(tree, logits, [0], sampler).nodes) == 3
    expected = 1 - 0.75**3
    assert abs(depth / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_published_never_draws_a_filtered_token() -> None:
    tree = TreeBuilder(0).build(0)
    logits = torch.tensor([[0.0, 3.0, -5.0, 2.9, -5.0]])
    drawn = set()
    for seed in range(300):
        sampler = Sampler(SamplingParams(seed=seed, top_k=2, repetition_penalty=1.0), 5)
        drawn.add(accept_published(tree, logits, [0], sampler).token)
    assert drawn == {1, 3}


def test_published_draws_of_two_depths_are_independent() -> None:
    """A chain 1 → 1 under uniform laws over four tokens: both accepted once in 16 runs, not in 4."""
    builder = TreeBuilder(0)
    builder.add_path([1, 1])
    tree = builder.build(2)
    runs = 2000
    both = 0
    for seed in range(runs):
        sampler = Sampler(SamplingParams(seed=seed, min_p=0.0, repetition_penalty=1.0), 4)
        both += len(accept_published(tree, torch.zeros(3, 4), [0], sampler).nodes) == 3
    assert abs(both / runs - 1 / 16) < 4 * math.sqrt(1 / 16 * 15 / 16 / runs)


def test_published_first_of_equal_paths_wins() -> None:
    """No path matches: the token is the first leaf's draw, the one a bare root would make."""
    builder = TreeBuilder(0)
    builder.add_levels([[7, 8, 9]])
    tree = builder.build(1)
    logits = torch.zeros(4, 10)
    logits[:, 7:] = -math.inf
    seen = set()
    for seed in range(30):
        sampler = Sampler(SamplingParams(seed=seed, repetition_penalty=1.0), 10)
        bare = accept_published(TreeBuilder(0).build(0), logits[:1], [0], sampler)
        assert accept_published(tree, logits, [0], sampler) == bare
        seen.add(bare.token)
    assert len(seen) > 3
