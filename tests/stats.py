"""Chi-square test of observed outcomes against an exactly known law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from scipy.stats import chi2


def chi_square(outcomes: Iterable[Hashable], law: Mapping[Any, float], least: float = 5.0) -> float:
    """p-value of the outcomes under the law.

    Cells are pooled, rarest first, until each has an expected count of at least ``least``. An
    outcome that the law excludes gives 0.
    """
    counts = Counter(outcomes)
    total = sum(counts.values())
    assert abs(sum(law.values()) - 1) < 1e-6, "the law's probabilities do not add up to 1"
    if any(law.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return 0.0
    cells: list[tuple[float, int]] = []
    expected, observed = 0.0, 0
    for outcome, probability in sorted(law.items(), key=lambda item: item[1]):
        expected += probability * total
        observed += counts[outcome]
        if expected >= least:
            cells.append((expected, observed))
            expected, observed = 0.0, 0
    if expected and cells:
        cells[-1] = (cells[-1][0] + expected, cells[-1][1] + observed)
    assert len(cells) > 1, "too few outcomes for a test"
    statistic = sum((seen - mean) ** 2 / mean for mean, seen in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
