"""How likely a candidate is accepted, learnt from the steps.

With coupled drafting, a draft ranks tokens by its own scores plus the target's noise, so the lead
of its best candidate over the next says how likely the target agrees. For each source of
candidates, a logistic regression on a few features of the ranking gives every candidate's chance of
acceptance. It starts from the library's weights or the heads file's, and learns from every position
whose token becomes known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import NamedTuple

from tokenswift.sampling.rows import Ranked
from tokenswift.tree import MAX_CHANCE

_LOGS = [math.log(rank + 1.0) for rank in range(64)]
_MAX_GAP = 3.0  # larger differences of noisy scores carry no further information
_RATE = 0.06  # learning rate
#: source → initial weights for the best candidate, and for the others
_PRIORS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "hidden": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
    "backbone": ((1.2, 0.6, 0.5, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "model": ((0.0, 0.5, 0.4, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "after": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
}
_DEFAULT_PRIOR = _PRIORS["hidden"]  # for sources without weights of their own


def features(ranked: Ranked, rank: int, depth: int) -> tuple[float, ...]:
    """Features of a candidate of a ranking, 0 being the best, ``depth`` levels below its source's
    start.

    They are 1; the gap (the best one's lead over the second, or another's distance behind the
    best); its logarithm; the draft's probability; the depth; and the logarithm of the rank.
    """
    values = ranked.values
    other = rank or 1
    gap = _MAX_GAP
    if other < len(values):
        gap = min(_MAX_GAP, values[0] - values[other])
    return (
        1.0,
        gap,
        math.log(gap + 0.1),
        ranked.probs[rank],
        float(depth),
        _LOGS[rank],
    )


class Regression:
    """One logistic regression, trained online by normalised gradient steps.

    Args:
        weights: initial weights.
        rate: learning rate.
    """

    def __init__(self, weights: Sequence[float], rate: float = _RATE) -> None:
        self.weights = list(weights)
        self.rate = rate

    def chance(self, values: Sequence[float]) -> float:
        """Predicted probability for the values of the features."""
        score = sum(map(mul, self.weights, values))
        return 1.0 / (1.0 + math.exp(-score)) if score > -30 else 0.0

    def learn(self, values: Sequence[float], error: float) -> None:
        """One gradient step; ``error`` is the outcome (0 or 1) minus the predicted probability."""
        step = self.rate * error / sum(map(mul, values, values))
        pairs = zip(self.weights, values, strict=True)
        self.weights = [weight + step * value for weight, value in pairs]


class _SourceModel(NamedTuple):
    """The regressions of a source of candidates: for the best of a ranking, and for the others."""

    best: Regression
    others: Regression

    def of_rank(self, rank: int) -> Regression:
        return self.others if rank else self.best


class Calibration:
    """The regressions of all sources, two each: one for the best candidate, one for the others.

    Args:
        priors: source → (initial weights for the best candidate, for the others), where better ones
            than the library's are known (a heads file brings its own).
    """

    def __init__(self, priors: Mapping[str, Sequence[Sequence[float]]] | None = None) -> None:
        self._models: dict[str, _SourceModel] = {}
        self._priors = {**_PRIORS, **(priors or {})}

    def _model(self, source: str) -> _SourceModel:
        if source not in self._models:
            best, others = self._priors.get(source, _DEFAULT_PRIOR)
            self._models[source] = _SourceModel(Regression(best), Regression(others))
        return self._models[source]

    def chances(
        self, source: str, ranked: Ranked, depth: int
    ) -> tuple[list[float], Callable[[int], None]]:
        """Each candidate's chance, and a function that learns from the token that the target chose
        there."""
        model = self._model(source)
        inputs = [features(ranked, rank, depth) for rank in range(len(ranked.tokens))]
        chances = [model.of_rank(rank).chance(values) for rank, values in enumerate(inputs)]
        total = sum(chances)
        if total > MAX_CHANCE:  # at most one is right
            chances = [chance * MAX_CHANCE / total for chance in chances]

        def learn(right: int) -> None:
            for rank, token in enumerate(ranked.tokens):
                model.of_rank(rank).learn(inputs[rank], (token == right) - chances[rank])

        return chances, learn
