"""The distribution of whole runs on the user's model, against the probabilities that they should follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenswift.audit.logits import last_logits
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM

LEAST = 5.0  # expected count of a cell of the test
FEWEST = 100  # runs of a test
CONTEXT = 32  # tokens of a prompt that runs go on from: its last
LENGTH = 2  # new tokens of a run: the second comes from a drafted node, or from a step of its own
Pair = tuple[int, ...]  # of its tokens the first two, one or none


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


def chi_square(outcomes: Iterable[Hashable], distribution: Mapping[Any, float], least: float = LEAST) -> Fit:
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


@torch.inference_mode()
def likely_pairs(llm: LLM, prompt: list[int], params: SamplingParams, runs: int) -> dict[Pair, float]:
    """Probabilities of the two tokens after a prompt, from the logits of one-row passes.

    Args:
        prompt: token ids.
        runs: pairs that fewer than :data:`LEAST` of these runs are expected to show are one outcome, that of
            their first token, or () where that is as rare.
    """
    sampler = llm.target.sampler(params)

    def after(text: list[int]) -> list[tuple[int, float]]:
        row = last_logits(llm, text)
        chances = sampler.scores(row[None], text, [[]])[0].double().softmax(-1)
        likely = (chances * runs >= LEAST).nonzero().flatten().tolist()
        return [(token, float(chances[token])) for token in likely]

    found: dict[Pair, float] = {}
    for first, p in after(prompt):
        often = [(second, p * q) for second, q in after([*prompt, first]) if p * q * runs >= LEAST]
        found |= {(first, second): both for second, both in often}
        found[first,] = max(0.0, p - sum(both for _, both in often))
    return {**found, (): max(0.0, 1.0 - sum(found.values()))}


def outcome(pair: Pair, law: dict[Pair, float]) -> Pair:
    """What of a pair of tokens :func:`likely_pairs` tells apart."""
    return next(known for known in (pair, pair[:1], ()) if known in law)


def testable(law: dict[Pair, float], runs: int = FEWEST) -> bool:
    """Whether so many runs can show two outcomes often enough for a test."""
    return sum(p * runs >= LEAST for p in law.values()) > 1


def pairs_written(
    llm: LLM, prompt: list[int], strategy: str, options: dict[str, Any], params: SamplingParams, runs: int
) -> Iterator[Pair]:
    """The two tokens after a prompt in whole runs, with the sampling's seed and those after it."""
    for seed in range(params.seed, params.seed + runs):
        given = replace(params, seed=seed)
        yield tuple(llm.generate(prompt, LENGTH, strategy, options, given, ignore_eos=True).token_ids)
