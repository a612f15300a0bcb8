"""The audit's parts: chi-square, enumerated distributions of both rules, the numeric error, near-ties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from tests.planted import cast, prefilled, second_part_shifted
from tests.tiny import FAMILIES, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit import distribution, equality, toy
from tokenswift.audit.passes import numeric_error
from tokenswift.models.decoder import LeanTarget
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.accept import accept_published
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
    found: dict[int, float] = {}
    for tokens, probability in step.items():
        found[tokens[0]] = found.get(tokens[0], 0.0) + probability
    return found


TREES = [
    tree_of([1]),
    tree_of([1, 2], [1, 3], [1, 0], [2]),
    tree_of([1, 2, 3], [1, 2, 0], [3, 3], [1, 1]),
]

# ---- chi-square ---------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic,freedom", [(0.5, 1), (10.0, 10), (37.3, 22), (900.0, 33), (1.0, 200)])
def test_survival_equals_scipy(statistic: float, freedom: int) -> None:
    expected = float(chi2.sf(statistic, freedom))
    assert distribution.survival(statistic, freedom) == pytest.approx(expected, rel=1e-8)


def test_chi_square_accepts_the_true_distribution_and_refuses_a_wrong_one() -> None:
    generator = torch.Generator().manual_seed(1)
    true, wrong = {0: 0.5, 1: 0.3, 2: 0.2}, {0: 0.45, 1: 0.35, 2: 0.2}
    drawn = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 8000, True, generator=generator).tolist()
    assert distribution.chi_square(drawn, true).p > 1e-3
    assert distribution.chi_square(drawn, wrong).p < 1e-6
    assert distribution.chi_square(drawn, true).variation < 0.02


def test_chi_square_p_values_are_uniform_under_the_law() -> None:
    """Its own calibration: over 300 samples from the distribution, the p-values are uniform."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    exact = dict(enumerate(weights.double().div(weights.double().sum()).tolist()))
    values = sorted(
        distribution.chi_square(torch.multinomial(weights, 400, True, generator=generator).tolist(), exact).p
        for _ in range(300)
    )
    furthest = max(abs(value - (i + 0.5) / 300) for i, value in enumerate(values))
    assert furthest < 1.63 / math.sqrt(300)  # Kolmogorov-Smirnov at 1%


def test_an_excluded_outcome_gives_zero() -> None:
    assert distribution.chi_square([0, 0, 1, 2], {0: 0.5, 1: 0.5}).p == 0.0


def test_a_bad_law_or_too_few_outcomes_are_refused() -> None:
    with pytest.raises(ValueError, match="add up"):
        distribution.chi_square([0], {0: 0.5})
    with pytest.raises(ValueError, match="too few"):
        distribution.chi_square([0, 1], {0: 0.5, 1: 0.5})


# ---- enumeration --------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_the_exact_rule_has_the_target_law_without_sampling(tree: DraftTree) -> None:
    step = distribution.exact_step(tree, after)
    assert sum(step.values()) == pytest.approx(1)
    whole = distribution.continued(step, after, 4)
    target = distribution.joint_distribution(after, 4)
    assert distribution.variation(whole, target) < 1e-12


@pytest.mark.parametrize("tree", TREES[1:])
def test_the_published_rule_has_another_law_without_sampling(tree: DraftTree) -> None:
    step = distribution.published_step(tree, after)
    assert sum(step.values()) == pytest.approx(1)
    whole = distribution.continued(step, after, 4)
    assert distribution.variation(whole, distribution.joint_distribution(after, 4)) > 0.02


def test_the_published_rule_is_exact_on_a_chain() -> None:
    """One path has one draw per place: nothing to go wrong."""
    whole = distribution.continued(distribution.published_step(tree_of([1, 2, 3]), after), after, 4)
    assert distribution.variation(whole, distribution.joint_distribution(after, 4)) < 1e-12


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
    seen = published_steps(tree, 4000)
    assert distribution.chi_square(seen, distribution.published_step(tree, after)).p > 1e-4
    if tree is not TREES[0]:
        assert (
            distribution.chi_square(seen, distribution.exact_step(tree, after)).p < 1e-6
        )  # negative control


def branching_tree() -> DraftTree:
    """Tree paths and branches together; one branch repeats a path of the tree, one is a prefix of it."""
    builder = CandidateTree(0)
    builder.add_levels([[1], [2, 0, 1]])
    builder.add_path([1, 2])
    builder.add_path([1])
    builder.add_path([1, 3, 2])
    return builder.build()


def test_the_closed_form_counts_branches_that_repeat_a_path() -> None:
    tree = branching_tree()
    seen = published_steps(tree, 6000)
    step = distribution.published_step(tree, after)
    assert sum(step.values()) == pytest.approx(1)
    assert first_token(step)[1] == pytest.approx(1 - (1 - after(())[1]) ** 6)
    assert distribution.chi_square(seen, step).p > 1e-4
    merged = replace(tree, branches=tree.branches[-1:])  # negative control: each distinct path once
    assert distribution.chi_square(seen, distribution.published_step(merged, after)).p < 1e-6


def test_the_closed_form_of_three_equal_leaves() -> None:
    """p = 0.3 each: .2235 for the first and the last path, .21 for the middle one, and what is left."""
    tree = tree_of([0], [1], [2])
    found = distribution.published_step(tree, lambda tokens: [0.3, 0.3, 0.3, 0.1])
    kept = {
        token: sum(p for key, p in found.items() if len(key) == 2 and key[0] == token) for token in range(3)
    }
    assert kept == pytest.approx({0: 0.2235, 1: 0.21, 2: 0.2235})
    # none matched (0.343): the first or the last path's own draw, which is not its leaf
    third = 0.343 * 3 / 7
    assert [found[(token,)] for token in range(4)] == pytest.approx([third / 2, third, third / 2, 0.343 / 7])


def test_steps_of_the_published_rule_are_independent() -> None:
    """Two steps with the same tree: their joint distribution is made of the step's, text by text."""
    tree = branching_tree()

    def step_after(text: tuple[int, ...]) -> distribution.Distribution:
        return distribution.published_step(tree, lambda path: after((*text, *path)))

    joint: distribution.Distribution = {}
    for first, p in step_after(()).items():
        for second, q in step_after(first).items():
            key = (len(first), *first, *second)
            joint[key] = joint.get(key, 0.0) + p * q
    seen = []
    for seed in range(4000):
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
    assert distribution.chi_square(seen, joint).p > 1e-4


def test_first_token_of_m_leaves() -> None:
    """The bias in one number: m leaves below a token of probability p accept it with 1 - (1-p)^m."""
    tree = tree_of(*([1, a, b] for a, b in itertools.product(range(3), repeat=2)))
    found = first_token(distribution.published_step(tree, after))
    assert found[1] == pytest.approx(1 - (1 - after(())[1]) ** 9)


# ---- the toy of every family --------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_toy_runs_follow_the_enumerated_law(family: str) -> None:
    model = tiny_model(family)
    state = torch.random.get_rng_state()
    llm = toy.toy_llm(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert llm.model.config.model_type == model.config.model_type and llm.target.vocab_size == toy.VOCAB
    params = toy.CASES["all"]
    exact = toy.toy_distribution(llm.model, params)
    plain = list(toy.outcomes(llm, "autoregressive", params, 100))
    assert list(toy.outcomes(llm, "tokenswift", params, 100)) == plain
    assert distribution.chi_square(plain, exact).p > 1e-4


def test_the_toy_sees_each_processor_and_the_published_rule() -> None:
    """Negative controls: no case passes under another case's distribution, nor does the published rule."""
    llm = toy.toy_llm(tiny_model("llama"))
    seen = list(toy.outcomes(llm, "autoregressive", toy.CASES["no processor"], 900))
    for name, params in toy.CASES.items():
        p = distribution.chi_square(seen, toy.toy_distribution(llm.model, params)).p
        assert p > 1e-4 if name == "no processor" else p < 1e-6, name
    for name in ("min-p", "all"):
        biased = list(toy.outcomes(llm, "tokenswift", toy.CASES[name], 150, (toy.PUBLISHED,)))
        assert distribution.chi_square(biased, toy.toy_distribution(llm.model, toy.CASES[name])).p < 1e-6


# ---- divergences --------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"tree": (1, 3, 3, 3), "ngrams": 6, "budget": 24, "draft": "partial"}
PROMPT = torch.randint(2, VOCAB, (30,), generator=torch.Generator().manual_seed(6)).tolist()


def written(family: str, params: SamplingParams, dtype: torch.dtype = torch.float32):
    llm = LLM.from_model(cast(tiny_model(family), dtype))
    plain = equality.plain_text(llm, PROMPT, 60, params)
    return llm, plain, numeric_error(llm, PROMPT, plain.tokens, plain.kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_tokens_and_a_small_sound_error(family: str) -> None:
    llm, plain, error = written(family, SamplingParams())
    assert error.positions >= 30 and error.sound and 0 <= error.error < 1e-4, error
    assert 0 < error.rounding.own.typical <= error.rounding.own.worst < 1e-4
    got = llm.generate(PROMPT, 60, "tokenswift", OPTIONS, plain.params, ignore_eos=True)
    assert equality.account(llm, plain, "tokenswift", OPTIONS, got.token_ids, error) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_sound(family: str, dtype: torch.dtype) -> None:
    llm, plain, error = written(family, SamplingParams(), dtype)
    assert error.sound, error


def test_the_published_rule_is_no_near_tie() -> None:
    llm, plain, error = written("llama", SamplingParams())
    options = OPTIONS | {"acceptance": "published"}
    got = llm.generate(PROMPT, 60, "tokenswift", options, plain.params, ignore_eos=True)
    found = equality.account(llm, plain, "tokenswift", options, got.token_ids, error)
    assert found is not None and not found.near_tie and not found.reproduced
    assert found.plain[0] != found.other[0] and found.before


def test_a_model_that_computes_trees_wrongly_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong positions make the measured error large as well; the reference pass tells it from rounding."""
    llm, plain, good = written("llama", SamplingParams())
    real = llm.target.forward

    def late(tokens: Any, positions: Any, cache: Any, parents: Any = None) -> Any:
        off = 3 if parents is not None and len(tokens) > 1 else 0
        return real(tokens, positions + off, cache, parents)

    monkeypatch.setattr(llm.target, "forward", late)
    bad = numeric_error(llm, PROMPT, plain.tokens, plain.kept)
    assert not bad.sound and bad.error > 100 * good.unit
    got = llm.generate(PROMPT, 60, "tokenswift", OPTIONS, plain.params, ignore_eos=True)
    found = equality.account(llm, plain, "tokenswift", OPTIONS, got.token_ids, good)
    assert found is not None and not found.near_tie


def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of different numbers of rows round differently, by about a unit of bfloat16. The rounding is
    planted: how a machine rounds bfloat16 depends on its kind."""
    real = LeanTarget.logits

    def logits(self: LeanTarget, hidden: torch.Tensor) -> torch.Tensor:
        found = real(self, hidden)
        return found * (1 + 2**-8 * torch.sin(1000 * found + len(hidden)))

    monkeypatch.setattr(LeanTarget, "logits", logits)


def divergences(plant: Callable[[LLM], LLM] = lambda llm: llm) -> list[equality.Divergence]:
    """The divergences of texts by a bfloat16 model with a planted defect; the error is a sound model's."""
    found = []
    for seed in range(6):
        params = SamplingParams(seed=seed, min_p=0.02)
        _, _, error = written("llama", params, torch.bfloat16)
        assert error.sound
        llm = plant(LLM.from_model(cast(tiny_model("llama"), torch.bfloat16)))
        plain = equality.plain_text(llm, PROMPT, 60, params)
        got = llm.generate(PROMPT, 60, "tokenswift", OPTIONS, plain.params, ignore_eos=True)
        found.append(equality.account(llm, plain, "tokenswift", OPTIONS, got.token_ids, error))
    return [divergence for divergence in found if divergence is not None]


def test_divergences_by_rounding_are_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded(monkeypatch)
    found = divergences()
    assert found, "no divergence: nothing was tested"
    assert all(divergence.near_tie for divergence in found), found


def test_a_tie_between_passes_that_are_both_wrong_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes share the wrong positions, so each reproduces its own token and both agree."""
    rounded(monkeypatch)
    found = divergences(lambda llm: prefilled(llm, second_part_shifted(20)))
    assert found, "no divergence: nothing was tested"
    assert all(d.reproduced and d.difference <= 4 * d.error for d in found), found
    assert not any(divergence.near_tie for divergence in found), found


def test_flipping_shift_measures_ties_and_filter_edges() -> None:
    plain = Sampler(SamplingParams(greedy=True, repetition_penalty=1.0), 3)
    row = torch.tensor([1.0, 0.9, -5.0])
    assert equality.flipping_shift(plain, row, [0], 0, 1) == pytest.approx(0.05, rel=1e-3)
    # Token 1 would win by its noise, but min-p drops it by a hair: 0.001 of its logit is missing.
    seed = next(s for s in range(99) if Sampler(SamplingParams(seed=s), 3).noise.at(1).argmax() == 1)
    filtered = Sampler(SamplingParams(min_p=0.5, repetition_penalty=1.0, seed=seed), 3)
    edge = torch.tensor([0.0, math.log(0.5) - 0.001, -9.0])
    if filtered.noise.at(1)[1] - filtered.noise.at(1)[0] > 1:
        assert filtered.choose(edge[None], [0], [[]]) == [0]
        assert equality.flipping_shift(filtered, edge, [0], 0, 1) == pytest.approx(0.0005, rel=1e-2)


def test_not_a_number_is_an_infinite_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, plain, _ = written("llama", SamplingParams())
    first = next(iter(plain.kept))
    plain.kept[first] = torch.full((VOCAB,), math.nan)
    assert numeric_error(llm, PROMPT, plain.tokens, plain.kept).error == math.inf
