"""Plain decoding: the bare root as the tree. The baseline of every ratio and of every exactness test."""

from __future__ import annotations

from typing import Any

from tokenswift.sampling.choice import Sampler
from tokenswift.spec.drafters.recipe import FixedWidths


class Autoregressive(FixedWidths):
    """One token per pass over the full cache.

    Args:
        llm, options: not looked at.
        sampler: the target's choice rule.
    """

    name = "autoregressive"

    def __init__(self, llm: Any, options: Any, sampler: Sampler) -> None:
        super().__init__([], sampler, coupled=True, widths=(), option=("tree", "1"))
