"""Exact distributions on tiny vocabularies, and the test of observed outcomes against one.

Two ways to show that a rule is lossless. *Enumeration*, where no chance is left: :func:`exact_step`
runs the real acceptance rule over every sequence of target choices, :func:`published_step` is the
closed form of the published rule. *Sampling*: :func:`chi_square` compares whole runs with a distribution that
:func:`joint_distribution` enumerated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenswift.spec.accept import accept_exact
from tokenswift.tree import published_paths
from tokenswift.types import DraftTree

Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """How well observed outcomes fit a distribution.

    Attributes:
        p: p-value of the chi-square test; 0 when an outcome occurred that the distribution excludes.
        statistic, freedom: chi-square and its degrees of freedom (0 and 0 for an excluded outcome).
        samples: outcomes observed.
        variation: total variation between the observed frequencies and the distribution. Not 0 for a perfect
            match either: sampling alone leaves about √(cells ÷ (2π · samples)).
    """

    p: float
    statistic: float
    freedom: int
    samples: int
    variation: float


def survival(statistic: float, freedom: int) -> float:
    """P(chi-square with ``freedom`` degrees of freedom > ``statistic``)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square(outcomes: Iterable[Hashable], distribution: Mapping[Any, float], least: float = 5.0) -> Fit:
    """Pearson's chi-square test of outcomes against an exactly known distribution.

    Cells are pooled, rarest first, until each has an expected count of at least ``least``. An
    outcome that the distribution excludes gives p = 0.

    Raises:
        ValueError: the distribution does not add up to 1, or too few outcomes for a test.
    """
    counts = Counter(outcomes)
    total = sum(counts.values())
    if abs(sum(distribution.values()) - 1) > 1e-6:
        raise ValueError(f"the distribution's probabilities add up to {sum(distribution.values())}; valid: 1")
    seen_or_possible = {**dict.fromkeys(counts), **dict.fromkeys(distribution)}
    variation = (
        0.5 * sum(abs(counts[o] / total - distribution.get(o, 0.0)) for o in seen_or_possible)
        if total
        else 0.0
    )
    if any(distribution.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return Fit(0.0, 0.0, 0, total, variation)
    cells: list[tuple[float, int]] = []
    expected, observed = 0.0, 0
    for outcome, probability in sorted(distribution.items(), key=lambda item: item[1]):
        expected += probability * total
        observed += counts[outcome]
        if expected >= least:
            cells.append((expected, observed))
            expected, observed = 0.0, 0
    if expected and cells:
        cells[-1] = (cells[-1][0] + expected, cells[-1][1] + observed)
    if len(cells) < 2:
        raise ValueError(f"{total} outcomes are too few for a test")
    statistic = sum((seen - mean) ** 2 / mean for mean, seen in cells)
    return Fit(survival(statistic, len(cells) - 1), statistic, len(cells) - 1, total, variation)


def joint_distribution(after: Callable[[Tokens], Sequence[float]], length: int) -> Distribution:
    """Probability of every continuation of ``length`` tokens.

    Args:
        after: the distribution of the token after some continuation, one probability per token id.
    """
    distribution: Distribution = {(): 1.0}
    for _ in range(length):
        distribution = {
            (*tokens, token): probability * p
            for tokens, probability in distribution.items()
            for token, p in enumerate(after(tokens))
            if p > 0
        }
    return distribution


def variation(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Total variation between two distributions."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {**one, **other})


def continued(
    distribution: Mapping[Tokens, float], after: Callable[[Tokens], Sequence[float]], length: int
) -> Distribution:
    """A step's distribution (of one token or more) carried on by plain decoding to ``length`` tokens."""
    full: Distribution = {}
    for tokens, probability in distribution.items():
        rest = joint_distribution(
            lambda more, start=tokens: after((*start, *more)), max(0, length - len(tokens))
        )
        for more, p in rest.items():
            key = (*tokens, *more)[:length]
            full[key] = full.get(key, 0.0) + probability * p
    return full


class _Script:
    """A choice rule that answers from a list and stops at its end."""

    def __init__(self, answers: Tokens) -> None:
        self.answers = list(answers)
        self.asked: Tokens | None = None

    def choose(self, logits: Tensor, history: list[int], paths: list[list[int]]) -> list[int]:
        """The next answer."""
        if not self.answers:
            self.asked = tuple(paths[0])
            raise LookupError
        return [self.answers.pop(0)]


def exact_step(tree: DraftTree, after: Callable[[Tokens], Sequence[float]]) -> Distribution:
    """The distribution of one step's tokens under the exact rule, without sampling.

    `spec.accept.accept_exact` itself is run over every sequence of choices that the target can make. A
    walk meets one node per position and the noise of different positions is independent, so a sequence's
    probability is the product of its choices'.
    """
    logits = torch.zeros(len(tree), 1, dtype=torch.float32)
    distribution: Distribution = {}
    open_: list[tuple[Tokens, float]] = [((), 1.0)]
    while open_:
        answers, probability = open_.pop()
        script = _Script(answers)
        try:
            accepted = accept_exact(tree, logits, [tree.tokens[0]], script)
        except LookupError:
            for token, p in enumerate(after(script.asked or ())):
                if p > 0:
                    open_.append(((*answers, token), probability * p))
            continue
        tokens = (*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token)
        distribution[tokens] = distribution.get(tokens, 0.0) + probability
    return distribution


def published_step(tree: DraftTree, after: Callable[[Tokens], Sequence[float]]) -> Distribution:
    """The distribution of one step's tokens under the published rule, in closed form.

    The draws of different paths are independent. Path i stops after l matches with some token; it then
    wins as the first of the tied paths where every path before it has fewer matches and every path after
    it no more, and as the last where it is the other way round; either counts for one half (a path that
    is alone with l matches is both). Its token is its own draw at that place.

    Args:
        tree: its paths and their order are those of `tree.published_paths`.
        after: the distribution of the token after some path, one probability per token id.
    """
    paths = [[tree.tokens[node] for node in path[1:]] for path in published_paths(tree)]
    reach: list[list[float]] = []  # reach[i][l]: probability of at least l matches on path i
    for path in paths:
        chances = [1.0]
        for depth, token in enumerate(path):
            chances.append(chances[-1] * after(tuple(path[:depth]))[token])
        reach.append(chances)

    def fewer(chosen: Sequence[list[float]], length: int) -> float:
        """Probability that each of these paths has fewer than ``length`` matches."""
        return math.prod(1.0 - (chances[length] if length < len(chances) else 0.0) for chances in chosen)

    distribution: Distribution = {}
    for i, path in enumerate(paths):
        before, behind = reach[:i], reach[i + 1 :]
        for length in range(len(path) + 1):
            first = fewer(before, length) * fewer(behind, length + 1)
            last = fewer(before, length + 1) * fewer(behind, length)
            wins = reach[i][length] * (first + last) / 2
            for token, p in enumerate(after(tuple(path[:length]))):
                matched = length < len(path) and token == path[length]
                if p > 0 and wins > 0 and not matched:
                    key = (*path[:length], token)
                    distribution[key] = distribution.get(key, 0.0) + wins * p
    return distribution
