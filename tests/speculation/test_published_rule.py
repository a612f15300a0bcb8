"""The published rule's draws, as its docstring has them: a function of seed, position and path, one
for each path, from what the filters leave."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny import add_levels
from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.rivals.published import accept_published
from tokenswift.tree import CandidateTree
from tokenswift.types import Accepted


def sampler(seed: int, width: int, **changes: int) -> Sampler:
    return Sampler(SamplingParams(**{**NEUTRAL, **changes}, seed=seed), width)


def is_near(count: int, runs: int, chance: float) -> bool:
    """Within four standard deviations."""
    return abs(count / runs - chance) < 4 * math.sqrt(chance * (1 - chance) / runs)


def test_draws_are_keyed_by_seed_and_position() -> None:
    builder = CandidateTree(9)
    add_levels(builder, [[1, 5], [2]])
    tree = builder.build()

    def accepted(seed: int, length: int) -> Accepted:
        history = [0] * (length - 1) + [9]
        return accept_published(tree, torch.zeros(len(tree), 10), history, sampler(seed, 10))

    assert accepted(3, 5) == accepted(3, 5)
    assert len({accepted(seed, 5) for seed in range(60)}) > 10
    assert len({accepted(3, length) for length in range(1, 60)}) > 10


def test_each_path_has_a_draw_of_its_own() -> None:
    """Three leaves of a chance of 1/4 below a certain token: one of them is met in 1 - (3/4)³ of
    the runs; one draw for all would meet them in 3/4."""
    builder = CandidateTree(0)
    add_levels(builder, [[1], [0, 1, 2]])
    tree = builder.build()
    logits = torch.zeros(len(tree), 4)
    logits[0, 1] = 1000.0
    met = [len(accept_published(tree, logits, [0], sampler(seed, 4)).nodes) for seed in range(1000)]
    assert is_near(met.count(3), 1000, 1 - 0.75**3)


def test_draws_of_two_depths_are_independent() -> None:
    """Both tokens of a chain are met in one run of 16, not in one of 4."""
    builder = CandidateTree(0)
    builder.add_path([1, 1])
    tree = builder.build()
    zeros = torch.zeros(3, 4)
    met = [len(accept_published(tree, zeros, [0], sampler(seed, 4)).nodes) for seed in range(800)]
    assert is_near(met.count(3), 800, 1 / 16)


@pytest.mark.parametrize("top", [1, 2])
def test_no_filtered_token_is_drawn(top: int) -> None:
    tree = CandidateTree(0).build()
    logits = torch.tensor([[0.0, 3.0, -5.0, 2.9, -5.0]])
    drawn = {
        accept_published(tree, logits, [0], sampler(seed, 5, top_k=top)).token
        for seed in range(200)
    }
    assert drawn == {1, 3} if top == 2 else {1}
