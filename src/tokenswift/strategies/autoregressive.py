"""Plain decoding: the bare root as the tree. The baseline of every ratio and of every exactness test."""

from __future__ import annotations

from tokenswift.interfaces import Sequence
from tokenswift.memory import Need
from tokenswift.types import DraftTree, Step


class Autoregressive:
    """One token per pass over the full cache."""

    name = "autoregressive"
    acceptance = "exact"
    max_nodes = 1

    def needs(self, text: int, row: int) -> list[Need]:
        """Nothing but the one row, which is not worth counting."""
        return []

    def begin(self, sequence: Sequence) -> None:
        """Nothing to prepare."""

    def draft(self, sequence: Sequence) -> DraftTree:
        """The newest token alone."""
        return DraftTree(
            tokens=(sequence.tokens[-1],), parents=(-1,), depths=(0,), sources=("target",), gamma=0
        )

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Nothing to learn."""
