"""The distribution of both acceptance rules, enumerated; whole runs on toys of every family follow
it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.families import families
from tests.lossless import enumeration, toy
from tests.planted import windowless
from tests.stats import chi_square
from tests.tiny import add_levels, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.rivals.published import accept_published
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree

ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).softmax(-1).tolist()


def after(path: tuple[int, ...]) -> list[float]:
    """A distribution of 4 tokens that depends on the last token."""
    return ROWS[path[-1] if path else 0]


def tree_of(*paths: list[int]) -> DraftTree:
    builder = CandidateTree(0)
    for path in paths:
        builder.add_path(path, "head")
    return builder.build()


def first_token(step: dict[tuple[int, ...], float]) -> dict[int, float]:
    """The distribution of a step's first token alone."""
    law: dict[int, float] = {}
    for tokens, probability in step.items():
        law[tokens[0]] = law.get(tokens[0], 0.0) + probability
    return law


TREES = [
    tree_of([1]),
    tree_of([1, 2], [1, 3], [1, 0], [2]),
    tree_of([1, 2, 3], [1, 2, 0], [3, 3], [1, 1]),
]

# ---- enumeration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_the_exact_rule_has_the_target_law_without_sampling(tree: DraftTree) -> None:
    step = enumeration.exact_step(tree, after)
    assert sum(step.values()) == pytest.approx(1)
    law = enumeration.continued(step, after, 4)
    target = enumeration.joint_distribution(after, 4)
    assert enumeration.variation(law, target) < 1e-12


@pytest.mark.parametrize("tree", TREES[1:])
def test_the_published_rule_has_another_law_without_sampling(tree: DraftTree) -> None:
    step = enumeration.published_step(tree, after)
    assert sum(step.values()) == pytest.approx(1)
    law = enumeration.continued(step, after, 4)
    assert enumeration.variation(law, enumeration.joint_distribution(after, 4)) > 0.02


def test_the_published_rule_is_exact_on_a_chain() -> None:
    """One path has one draw per place: nothing to go wrong."""
    law = enumeration.continued(enumeration.published_step(tree_of([1, 2, 3]), after), after, 4)
    assert enumeration.variation(law, enumeration.joint_distribution(after, 4)) < 1e-12


def published_steps(tree: DraftTree, seeds: int) -> list[tuple[int, ...]]:
    """Tokens of a step by the published rule, for every seed."""
    logits = torch.tensor(
        [after(tuple(tree.tokens[i] for i in tree.path(node))) for node in range(len(tree))]
    )
    seen = []
    for seed in range(seeds):
        sampler = Sampler(SamplingParams(min_p=0.0, repetition_penalty=1.0, seed=seed), 4)
        accepted = accept_published(tree, logits.log(), [0], sampler)
        seen.append((*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token))
    return seen


@pytest.mark.parametrize("tree", TREES)
def test_the_closed_form_is_the_law_of_the_published_code(tree: DraftTree) -> None:
    seen = published_steps(tree, 1000)
    assert chi_square(seen, enumeration.published_step(tree, after)) > 1e-4
    if tree is not TREES[0]:
        assert chi_square(seen, enumeration.exact_step(tree, after)) < 1e-6  # negative control


def branching_tree() -> DraftTree:
    """Tree paths and branches together; one branch repeats a path of the tree, one is a prefix of
    it."""
    builder = CandidateTree(0)
    add_levels(builder, [[1], [2, 0, 1]])
    builder.add_path([1, 2])
    builder.add_path([1])
    builder.add_path([1, 3, 2])
    return builder.build()


def test_the_closed_form_counts_branches_that_repeat_a_path() -> None:
    tree = branching_tree()
    seen = published_steps(tree, 2000)
    step = enumeration.published_step(tree, after)
    assert sum(step.values()) == pytest.approx(1)
    assert first_token(step)[1] == pytest.approx(1 - (1 - after(())[1]) ** 6)
    assert chi_square(seen, step) > 1e-4
    merged = replace(tree, branches=tree.branches[-1:])  # negative control: each distinct path once
    assert chi_square(seen, enumeration.published_step(merged, after)) < 1e-6


def test_the_closed_form_of_three_equal_leaves() -> None:
    """p = 0.3 each: .2235 for the first and the last path, .21 for the middle one, and what is
    left."""
    tree = tree_of([0], [1], [2])
    law = enumeration.published_step(tree, lambda tokens: [0.3, 0.3, 0.3, 0.1])
    first_kept = {
        token: sum(p for key, p in law.items() if len(key) == 2 and key[0] == token)
        for token in range(3)
    }
    assert first_kept == pytest.approx({0: 0.2235, 1: 0.21, 2: 0.2235})
    # none matched (0.343): the first or the last path's own draw, which is not its leaf
    third = 0.343 * 3 / 7
    assert [law[(token,)] for token in range(4)] == pytest.approx(
        [third / 2, third, third / 2, 0.343 / 7]
    )


def test_steps_of_the_published_rule_are_independent() -> None:
    """Two steps with the same tree: their joint distribution is made of the step's, text by
    text."""
    tree = branching_tree()

    def step_after(text: tuple[int, ...]) -> enumeration.Distribution:
        return enumeration.published_step(tree, lambda path: after((*text, *path)))

    joint: enumeration.Distribution = {}
    for first, p in step_after(()).items():
        for second, q in step_after(first).items():
            key = (len(first), *first, *second)
            joint[key] = joint.get(key, 0.0) + p * q
    seen = []
    for seed in range(1000):
        sampler = Sampler(SamplingParams(min_p=0.0, repetition_penalty=1.0, seed=seed), 4)
        text: list[int] = []
        marks: list[int] = []
        for _ in range(2):
            paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
            rows = torch.tensor([after((*text, *path)) for path in paths]).log()
            accepted = accept_published(tree, rows, [0, *text], sampler)
            text += [*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token]
            marks.append(len(text))
        seen.append((marks[0], *text))
    assert chi_square(seen, joint) > 1e-4


def test_first_token_of_m_leaves() -> None:
    """The bias in one number: m leaves below a token of probability p accept it with 1 -
    (1-p)^m."""
    tree = tree_of(*([1, a, b] for a, b in itertools.product(range(3), repeat=2)))
    law = first_token(enumeration.published_step(tree, after))
    assert law[1] == pytest.approx(1 - (1 - after(())[1]) ** 9)


# ---- the toy of every family ---------------------------------------------------------------------


@pytest.mark.parametrize("family", families())
def test_toy_runs_follow_the_enumerated_law(family: str) -> None:
    model = tiny_model(family)
    state = torch.random.get_rng_state()
    llm = toy.toy_llm(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert llm.model.config.model_type == model.config.model_type
    assert llm.target.vocab_size == toy.VOCAB
    params = toy.CASES["all"]
    exact = toy.toy_distribution(llm.model, params)
    plain = list(toy.outcomes(llm, "autoregressive", params, 100))
    assert list(toy.outcomes(llm, "tokenswift", params, 100)) == plain
    assert chi_square(plain, exact) > 1e-4


def test_the_toy_sees_each_processor_and_the_published_rule() -> None:
    """Negative controls: no case passes under another case's distribution, nor does the published
    rule."""
    llm = toy.toy_llm(tiny_model("llama"))
    seen = list(toy.outcomes(llm, "autoregressive", toy.CASES["no processor"], 900))
    for name, params in toy.CASES.items():
        p = chi_square(seen, toy.toy_distribution(llm.model, params))
        assert p > 1e-4 if name == "no processor" else p < 1e-6, name
    for name in ("min-p", "all"):
        biased = list(toy.outcomes(llm, "tokenswift", toy.CASES[name], 150, (toy.PUBLISHED,)))
        assert chi_square(biased, toy.toy_distribution(llm.model, toy.CASES[name])) < 1e-6


@pytest.mark.parametrize("ignored", [False, True])
def test_the_toy_sees_a_small_window_behind_a_long_prompt(ignored: bool) -> None:
    """The distribution behind two prefill chunks; a window that our passes ignore is another
    one."""
    small = toy.toy_model(tiny_model("mistral-sliding", sliding_window=4096))
    assert small.config.sliding_window == toy.WINDOW
    llm = windowless(small) if ignored else LLM.from_model(small, heads=None)
    params = toy.CASES["no processor"]
    seen = list(toy.outcomes(llm, "autoregressive", params, 150, prompt=toy.LONG_PROMPT))
    p = chi_square(seen, toy.toy_distribution(small, params, toy.LONG_PROMPT))
    assert p < 1e-5 if ignored else p > 1e-4
