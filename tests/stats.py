"""Chi-square test of observed outcomes against an exactly known distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from scipy.stats import chi2


def chi_square(
    outcomes: Iterable[Hashable], distribution: Mapping[Any, float], least: float = 5.0
) -> float:
    """p-value of the outcomes under the distribution; 0 where it excludes one of them. Cells are
    pooled, rarest first, until each has an expected count of at least ``least``."""
    counts = Counter(outcomes)
    if any(distribution.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return 0.0
    cells = [[0.0, 0.0]]  # expected, observed
    for outcome, probability in sorted(distribution.items(), key=lambda item: item[1]):
        cells[-1][0] += probability * counts.total()
        cells[-1][1] += counts[outcome]
        if cells[-1][0] >= least:
            cells.append([0.0, 0.0])
    rest = cells.pop()
    assert len(cells) > 1, f"{counts.total()} outcomes are too few for a test"
    cells[-1] = [cells[-1][0] + rest[0], cells[-1][1] + rest[1]]
    return float(chi2.sf(sum((seen - mean) ** 2 / mean for mean, seen in cells), len(cells) - 1))
