"""Exact distributions on tiny vocabularies: of continuations, and of a step by each acceptance
rule.

No chance is left: :func:`exact_step` runs the real acceptance rule over every sequence of target
    choices,
:func:`published_step` is the closed form of the published rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokenswift.config.sampling import SamplingParams
from tokenswift.speculation.accept import accept_exact
from tokenswift.speculation.rivals.published import published_paths
from tokenswift.types import DraftTree

Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]


def processed(row: Tensor, context: Tokens, params: SamplingParams) -> list[float]:
    """The exact distribution of the token after a context, by transformers' processors.

    Args:
        row: logits (V,).
    """
    chain: list[Callable[..., Tensor]] = []
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    chain.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p:
        chain.append(MinPLogitsWarper(float(params.min_p)))
    if params.eta_cutoff:
        chain.append(EtaLogitsWarper(float(params.eta_cutoff)))
    window = torch.tensor([context[-params.penalty_window :]])
    scores = row[None].clone()
    for processor in chain:
        scores = processor(window, scores)
    probabilities = scores[0].double().softmax(-1).tolist()
    if not params.xtc_probability:
        return probabilities
    share = params.xtc_probability
    excluded = without_top(probabilities, params.xtc_threshold)
    return [
        share * one + (1 - share) * other
        for one, other in zip(excluded, probabilities, strict=True)
    ]


def without_top(probabilities: list[float], threshold: float) -> list[float]:
    """The distribution that XTC leaves where it takes effect."""
    likely = sorted(p for p in probabilities if p >= threshold)
    if len(likely) < 2:
        return probabilities
    kept = [0.0 if p > likely[0] else p for p in probabilities]
    return [p / sum(kept) for p in kept]


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
    """A step's distribution (of one token or more) carried on by plain decoding to ``length``
    tokens."""
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
        self.path_after: Tokens | None = None

    def choose(self, logits: Tensor, history: list[int], paths: list[list[int]]) -> list[int]:
        """The next answer."""
        if not self.answers:
            self.path_after = tuple(paths[0])
            raise LookupError
        return [self.answers.pop(0)]


def exact_step(tree: DraftTree, after: Callable[[Tokens], Sequence[float]]) -> Distribution:
    """The distribution of one step's tokens under the exact rule, without sampling.

    `accept.accept_exact` itself is run over every sequence of choices that the target can
    make. A walk meets one node per position and the noise of different positions is independent, so
    a sequence's probability is the product of its choices'.
    """
    logits = torch.zeros(len(tree), 1, dtype=torch.float32)
    distribution: Distribution = {}
    open_: list[tuple[Tokens, float]] = [((), 1.0)]
    while open_:
        answers, probability = open_.pop()
        script: Any = _Script(answers)
        try:
            accepted = accept_exact(tree, logits, [tree.tokens[0]], script)
        except LookupError:
            for token, p in enumerate(after(script.path_after or ())):
                if p > 0:
                    open_.append(((*answers, token), probability * p))
            continue
        tokens = (*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token)
        distribution[tokens] = distribution.get(tokens, 0.0) + probability
    return distribution


def published_step(tree: DraftTree, after: Callable[[Tokens], Sequence[float]]) -> Distribution:
    """The distribution of one step's tokens under the published rule, in closed form.

    The draws of different paths are independent. Path i stops after l matches with some token; it
    then wins as the first of the tied paths where every path before it has fewer matches and every
    path after it no more, and as the last where it is the other way round; either counts for one
    half (a path that is alone with l matches is both). Its token is its own draw at that place.

    Args:
        tree: its paths and their order are those of `published.published_paths`.
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
        return math.prod(
            1.0 - (chances[length] if length < len(chances) else 0.0) for chances in chosen
        )

    distribution: Distribution = {}
    for i, path in enumerate(paths):
        before = reach[:i]
        behind = reach[i + 1 :]
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
