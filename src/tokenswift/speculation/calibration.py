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

from tokenswift.sampling.rows import Ranked

_LOGS = [math.log(at + 1.0) for at in range(64)]
_MAX_GAP = 3.0  # larger differences of noisy scores carry no further information
_RATE = 0.06  # learning rate
_PRIORS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # source → weights for the best candidate, weights for the others
    "hidden": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
    "backbone": ((1.2, 0.6, 0.5, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "model": ((0.0, 0.5, 0.4, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "after": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
}
_DEFAULT_PRIOR = _PRIORS["hidden"]  # for sources without weights of their own


def features(ranked: Ranked, at: int, depth: int) -> tuple[float, ...]:
    """Features of candidate ``at`` (0 is the best) of a ranking, ``depth`` levels below its
    source's start.

    They are 1; the gap (the best one's lead over the second, or another's distance behind the
    best); its logarithm; the draft's probability; the depth; and the logarithm of the rank.
    """
    values, other = ranked.values, at or 1
    gap = min(_MAX_GAP, values[0] - values[other]) if other < len(values) else _MAX_GAP
    return (1.0, gap, math.log(gap + 0.1), ranked.probs[at], float(depth), _LOGS[at])


class Regression:
    """One logistic regression, trained online by normalised gradient steps.

    Args:
        weights: initial weights.
        rate: learning rate.
    """

    def __init__(self, weights: Sequence[float], rate: float = _RATE) -> None:
        self.weights, self.rate = list(weights), rate

    def chance(self, x: Sequence[float]) -> float:
        """Predicted probability for features ``x``."""
        score = sum(map(mul, self.weights, x))
        return 1.0 / (1.0 + math.exp(-score)) if score > -30 else 0.0

    def learn(self, x: Sequence[float], error: float) -> None:
        """One gradient step; ``error`` is the outcome (0 or 1) minus the predicted probability."""
        step = self.rate * error / sum(map(mul, x, x))
        self.weights = [
            weight + step * value for weight, value in zip(self.weights, x, strict=True)
        ]


class Calibration:
    """The regressions of all sources, two each: one for the best candidate, one for the others.

    Args:
        priors: source → (initial weights for the best candidate, for the others), where better ones
            than the library's are known (a heads file brings its own).
    """

    def __init__(self, priors: Mapping[str, Sequence[Sequence[float]]] | None = None) -> None:
        self._models: dict[str, tuple[Regression, ...]] = {}
        self._priors = {**_PRIORS, **(priors or {})}

    def _model(self, kind: str) -> tuple[Regression, ...]:
        if kind not in self._models:
            pair = self._priors.get(kind, _DEFAULT_PRIOR)
            self._models[kind] = tuple(Regression(weights) for weights in pair)
        return self._models[kind]

    def chances(
        self, source: str, ranked: Ranked, depth: int
    ) -> tuple[list[float], Callable[[int], None]]:
        """Each candidate's chance, and a function that learns from the token that the target chose
        there."""
        first, others = self._model(source)
        inputs = [features(ranked, at, depth) for at in range(len(ranked.tokens))]
        chances = [(others if at else first).chance(x) for at, x in enumerate(inputs)]
        total = sum(chances)
        if total > 0.98:  # at most one is right
            chances = [chance * 0.98 / total for chance in chances]

        def learn(right: int) -> None:
            for at, token in enumerate(ranked.tokens):
                (others if at else first).learn(inputs[at], (token == right) - chances[at])

        return chances, learn
