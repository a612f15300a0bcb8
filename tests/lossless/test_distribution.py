"""The distribution of the output, against exact enumeration, for every processor and several
drafters.

A toy model (a table of random logits for each of the last two tokens) has a known joint
distribution of its first three tokens. It is enumerated with transformers' processors, a code path
of its own. The exact rule must reproduce that distribution and, seed by seed, the very tokens of
autoregressive decoding; the published rule must fail the same test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from tests.lossless import enumeration
from tests.lossless.enumeration import joint_distribution, processed
from tests.lossless.toy import CASES
from tests.stats import chi_square
from tests.tiny import add_levels
from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.rows import LogitRows
from tokenswift.sampling.sampler import Sampler
from tokenswift.sampling.xtc import excludes
from tokenswift.speculation.accept import accept_exact
from tokenswift.speculation.rivals.published import accept_published
from tokenswift.tree import CandidateTree, children
from tokenswift.types import Accepted, DraftTree

VOCAB = 6
PROMPT: tuple[int, ...] = (0, 3, 1)
LENGTH = 3
TABLE = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(20)) * 1.5

#: with all processors at once in the fast suite, each by itself in the slow one
LAWS = ["all", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "all")]


def logits_after(context: tuple[int, ...]) -> Tensor:
    """The toy target: (V,) logits from the last two tokens."""
    return TABLE[context[-2], context[-1]]


def distribution_after(context: tuple[int, ...], params: SamplingParams) -> list[float]:
    """The exact processed distribution after a context."""
    return processed(logits_after(context), context, params)


def joint_of(params: SamplingParams) -> enumeration.Distribution:
    """Probability of every continuation of LENGTH tokens."""
    return joint_distribution(lambda tokens: distribution_after((*PROMPT, *tokens), params), LENGTH)


# Drafters: each proposes a tree from the text so far (and may use the target's choice rule).


def no_draft(text: list[int], sampler: Sampler) -> DraftTree:
    return CandidateTree(text[-1]).build()


def bad_draft(text: list[int], sampler: Sampler) -> DraftTree:
    """Mostly a repetition of one fixed token, right only by accident."""
    builder = CandidateTree(text[-1])
    builder.add_path([5, 5, 5])
    builder.add_path([2, 0])
    return builder.build()


def arbitrary_draft(text: list[int], sampler: Sampler) -> DraftTree:
    """Random paths; a function of the text, and of the noise's seed to vary from run to run."""
    generator = torch.Generator().manual_seed(hash((*text, sampler.params.seed)) % 2**31)
    builder = CandidateTree(text[-1])
    lengths = torch.randint(0, 4, (6,), generator=generator).tolist()
    for length in lengths:
        builder.add_path(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    return builder.build()


def full_draft(text: list[int], sampler: Sampler) -> DraftTree:
    """Every token to depth 2: nothing is ever missing."""
    builder = CandidateTree(text[-1])
    add_levels(builder, [list(range(VOCAB))] * 2)
    return builder.build()


def coupled_draft(text: list[int], sampler: Sampler) -> DraftTree:
    """A perfect drafter: the target's own logits, ranked with the target's own noise."""
    builder = CandidateTree(text[-1])
    layer: list[tuple[int, list[int]]] = [(0, [])]
    for width in (1, 2):
        below = []
        for node, path in layer:
            logits = logits_after((*text, *path))[None]
            position = len(text) + len(path)
            rows = LogitRows(logits, text, [path], [position], [width], noise=1.0)
            for token in sampler.candidates(rows)[0].tokens:
                below.append((builder.add(node, token), [*path, token]))
        layer = below
    return builder.build()


def wide_draft(text: list[int], sampler: Sampler) -> DraftTree:
    """The shape of the paper's tree, from the target's probabilities (for the published rule)."""
    first = int(logits_after(tuple(text)).argmax())
    builder = CandidateTree(text[-1])
    add_levels(builder, [[first], [0, 2, 4], [1, 3, 5]])
    return builder.build()


DRAFTERS = [bad_draft, arbitrary_draft, full_draft, coupled_draft, wide_draft]
Rule = Callable[[DraftTree, Tensor, list[int], Sampler], Accepted]


def generate(
    params: SamplingParams, drafter: Callable, rule: Rule = accept_exact
) -> tuple[int, ...]:
    """A minimal decode loop: draft, verify, accept; at least LENGTH tokens, cut to LENGTH."""
    sampler = Sampler(params, VOCAB)
    text = list(PROMPT)
    while len(text) < len(PROMPT) + LENGTH:
        tree = drafter(text, sampler)
        paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(len(tree))]
        logits = torch.stack([logits_after((*text, *path)) for path in paths])
        accepted = rule(tree, logits, text, sampler)
        text += [tree.tokens[node] for node in accepted.nodes[1:]] + [accepted.token]
    return tuple(text[len(PROMPT) : len(PROMPT) + LENGTH])


def params_of(case: str, seed: int) -> SamplingParams:
    return replace(CASES[case], seed=seed)


@cache
def plain_decoding(case: str, seed: int) -> tuple[int, ...]:
    return generate(params_of(case, seed), no_draft)


@pytest.mark.parametrize("case", LAWS)
def test_trees_give_the_exact_distribution_and_the_tokens_of_plain_decoding(case: str) -> None:
    """Every drafter in turn, 400 seeds: equal token by token to plain decoding, which has the
    target's joint distribution over 2,000."""
    for seed in range(400):
        tokens = generate(params_of(case, seed), DRAFTERS[seed % len(DRAFTERS)])
        assert tokens == plain_decoding(case, seed), (case, seed)
    outcomes = [plain_decoding(case, seed) for seed in range(2000)]
    assert chi_square(outcomes, joint_of(params_of(case, 0))) > 1e-4


def test_the_cases_have_different_distributions() -> None:
    """Each processor changes the distribution enough for the test to see it: no case is vacuous."""
    outcomes = [plain_decoding("no processor", seed) for seed in range(2000)]
    for case in CASES:
        if case != "no processor":
            assert chi_square(outcomes, joint_of(params_of(case, 0))) < 1e-6, case


def test_a_window_that_does_not_slide_fails() -> None:
    """Negative control of the sliding penalty window: the root's window at every depth is seen."""
    params = params_of("penalty", 0)
    fixed: dict[tuple[int, ...], float] = {}
    root = torch.tensor([PROMPT[-params.penalty_window :]])
    penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for i, token in enumerate(tokens):
            row = penalty(root, logits_after((*PROMPT, *tokens[:i]))[None])  # type: ignore[arg-type]
            probability *= float(row[0].double().softmax(-1)[token])
        fixed[tokens] = probability
    outcomes = [plain_decoding("penalty", seed) for seed in range(1500)]
    assert chi_square(outcomes, fixed) < 1e-6


@pytest.mark.parametrize(
    "case",
    ["no processor", *(pytest.param(case, marks=pytest.mark.slow) for case in ("min-p", "all"))],
)
def test_the_published_rule_fails(case: str) -> None:
    """Negative control: independent draws per path are not lossless, with the same test."""
    outcomes = [
        generate(params_of(case, seed), wide_draft, accept_published) for seed in range(1000)
    ]
    assert chi_square(outcomes, joint_of(params_of(case, 0))) < 1e-6


def test_the_published_rule_is_sound_on_a_bare_root() -> None:
    """Without a tree its draws follow the distribution: the failure above is the rule's, not the
    draws'."""
    outcomes = [
        generate(params_of("min-p", seed), no_draft, accept_published) for seed in range(1000)
    ]
    assert chi_square(outcomes, joint_of(params_of("min-p", 0))) > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_enumerated_distribution_of_every_node(case: str) -> None:
    """No sampling: the processed scores of all nodes of a full tree, with windows sliding along the
    paths, are the exact conditional distributions; so the distribution is exact up to the
    noise's."""
    params = params_of(case, 0)
    text = list(PROMPT)
    paths = [list(p) for n in range(LENGTH) for p in itertools.product(range(VOCAB), repeat=n)]
    logits = torch.stack([logits_after((*text, *path)) for path in paths])
    ours = Sampler(params, VOCAB).scores(logits, text, paths).double().softmax(-1)
    contexts = [(*text, *path) for path in paths]
    decided = [  # for one seed, XTC takes effect at a position or does not
        replace(params, xtc_probability=float(excludes(params, len(context))))
        for context in contexts
    ]
    exact = torch.tensor(list(map(distribution_after, contexts, decided)), dtype=torch.float64)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-7)
    assert torch.equal(ours == 0, exact == 0)


class FixedChoice:
    """A choice rule given as a table from path to token: one point of the space of all noise."""

    def __init__(self, table: dict[tuple[int, ...], int]) -> None:
        self.table = table

    def choose(self, logits: Tensor, history: list[int], paths: list[list[int]]) -> list[int]:
        return [self.table[tuple(path)] for path in paths]


def binary_trees() -> list[DraftTree]:
    """All 25 trees over two tokens and two levels, the bare root included."""
    trees = []
    sides = [None, (), (0,), (1,), (0, 1)]
    for left, right in itertools.product(sides, repeat=2):
        builder = CandidateTree(0)
        for token, below in ((0, left), (1, right)):
            if below is not None:
                node = builder.add(0, token)
                for deeper in below:
                    builder.add(node, deeper)
        trees.append(builder.build())
    return trees


@pytest.mark.parametrize("all_rows", [False, True])
def test_every_tree_and_every_choice_rule_enumerated(all_rows: bool) -> None:
    """Exhaustive: for all 128 choice tables and all 25 trees a step yields plain decoding's tokens,
    and stops only where the tree has no such child."""
    contexts = [path for n in range(3) for path in itertools.product(range(2), repeat=n)]
    checked = 0
    for answers in itertools.product(range(2), repeat=len(contexts)):
        table = dict(zip(contexts, answers, strict=True))
        plain: list[int] = []
        while tuple(plain) in table:
            plain.append(table[tuple(plain)])
        for tree in binary_trees():
            logits = torch.zeros(len(tree), 2)
            choice: Any = FixedChoice(table)
            accepted = accept_exact(tree, logits, [0], choice, all_rows)
            path = [tree.tokens[node] for node in accepted.nodes[1:]]
            assert [*path, accepted.token] == plain[: len(path) + 1]
            assert list(accepted.nodes[1:]) == tree.path(accepted.nodes[-1])
            assert accepted.token not in children(tree)[accepted.nodes[-1]]
            checked += 1
    assert checked == 128 * 25


def test_published_bias_has_the_predicted_size() -> None:
    """m leaves below one token accept it with probability 1 - (1-p)^m, enumerated and simulated."""
    p = max(distribution_after(PROMPT, params_of("no processor", 0)))
    m = 9
    runs = 1000
    hits = sum(
        generate(params_of("no processor", seed), wide_draft, accept_published)[0]
        == int(logits_after(PROMPT).argmax())
        for seed in range(runs)
    )
    expected = 1 - (1 - p) ** m
    spread = math.sqrt(runs * expected * (1 - expected))
    assert abs(hits - runs * expected) < 4.5 * max(spread, 1.0)
    assert abs(hits - runs * p) > 10 * math.sqrt(runs * p * (1 - p))
