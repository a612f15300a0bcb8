"""How likely a drafted candidate is the target's choice, learnt while decoding.

With coupled drafting the draft ranks tokens by its own scores plus the target's noise, so how far the best
candidate leads says how likely the target agrees. For every source of candidates a logistic regression over
a handful of features of the ranking gives the chance of each candidate; it starts from figures that come
with the heads and learns from every place whose outcome becomes known, drafted or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tokenswift.sampling.choice import Ranked

_LOGS = [math.log(at + 1.0) for at in range(64)]
_FAR = 3.0  # perturbed scores further apart than this say no more
_RATE = 0.06  # step of the online regression
_PRIORS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # source → weights of the first candidate, weights of the others
    "hidden": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
    "backbone": ((1.2, 0.6, 0.5, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "model": ((0.0, 0.5, 0.4, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "after": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
}
_GENERAL = _PRIORS["hidden"]  # of kinds that nobody knows better weights for


def features(ranked: Ranked, at: int, depth: int) -> tuple[float, ...]:
    """The features of candidate ``at`` of a ranking, ``depth`` levels below where its source starts: 1, lead
    over the next one (the best) or distance behind the best (the others), its logarithm, its share in the
    draft, the depth, and the logarithm of the rank."""
    values = ranked.values
    if at == 0:
        gap = min(_FAR, values[0] - values[1]) if len(values) > 1 else _FAR
    else:
        gap = min(_FAR, values[0] - values[at])
    return (1.0, gap, math.log(gap + 0.1), ranked.shares[at], float(depth), _LOGS[at])


class Regression:
    """One logistic regression, updated by stochastic gradient steps.

    Args:
        weights: to start from.
        rate: step of the gradient.
    """

    __slots__ = ("weights", "rate")

    def __init__(self, weights: Sequence[float], rate: float = _RATE) -> None:
        self.weights, self.rate = list(weights), rate

    def chance(self, x: Sequence[float]) -> float:
        """The predicted probability."""
        _, x1, x2, x3, x4, x5 = x  # the first is 1; written out, since this runs for every candidate
        w0, w1, w2, w3, w4, w5 = self.weights
        score = w0 + w1 * x1 + w2 * x2 + w3 * x3 + w4 * x4 + w5 * x5
        return 1.0 / (1.0 + math.exp(-score)) if score > -30 else 0.0

    def learn(self, x: Sequence[float], error: float) -> None:
        """One step; ``error`` is the outcome (0 or 1) minus the predicted probability."""
        _, x1, x2, x3, x4, x5 = x
        w0, w1, w2, w3, w4, w5 = self.weights
        step = self.rate * error / (1.0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4 + x5 * x5)
        self.weights = [
            w0 + step,
            w1 + step * x1,
            w2 + step * x2,
            w3 + step * x3,
            w4 + step * x4,
            w5 + step * x5,
        ]


class Calibration:
    """The regressions of all sources.

    Args:
        priors: source → (weights of the first candidate, weights of the others), where better ones than the
            library's are known (a heads file brings its own).
    """

    def __init__(self, priors: Mapping[str, Sequence[Sequence[float]]] | None = None) -> None:
        self._models: dict[str, tuple[Regression, ...]] = {}
        self._priors = {**_PRIORS, **(priors or {})}

    def _model(self, kind: str) -> tuple[Regression, ...]:
        if kind not in self._models:
            pair = self._priors.get(kind, _GENERAL)
            self._models[kind] = tuple(Regression(weights) for weights in pair)
        return self._models[kind]

    def chances(self, source: str, ranked: Ranked, depth: int) -> tuple[list[float], list[tuple[float, ...]]]:
        """Chance of each candidate of a ranking, and the features it follows from."""
        first, others = self._model(source)
        made = [features(ranked, at, depth) for at in range(len(ranked.tokens))]
        found = [(others if at else first).chance(x) for at, x in enumerate(made)]
        total = sum(found)
        if total > 0.98:  # at most one is right
            found = [chance * 0.98 / total for chance in found]
        return found, made

    def learn(
        self, source: str, made: list[tuple[float, ...]], chances: list[float], tokens: list[int], right: int
    ) -> None:
        """Take in which token the target chose where this ranking was made."""
        first, others = self._model(source)
        for at, token in enumerate(tokens):
            (others if at else first).learn(made[at], (token == right) - chances[at])
