"""Chi-square test of observed outcomes against an exactly known law: the audit's."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from tokenswift.audit import law as _law


def chi_square(outcomes: Iterable[Hashable], law: Mapping[Any, float], least: float = 5.0) -> float:
    """p-value of the outcomes under the law."""
    return _law.chi_square(outcomes, law, least).p
