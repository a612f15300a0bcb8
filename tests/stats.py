"""Chi-square test of observed outcomes against an exactly known distribution: the audit's."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from tokenswift import audit as exact


def chi_square(outcomes: Iterable[Hashable], distribution: Mapping[Any, float], least: float = 5.0) -> float:
    """p-value of the outcomes under the distribution."""
    return exact.chi_square(outcomes, distribution, least)
