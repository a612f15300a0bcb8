"""Strategies with trees of fixed widths, as published methods have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenswift.config.strategies import tree_nodes
from tokenswift.memory import Need
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.accept import EXACT, AcceptanceRule
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.sequence_state import SequenceState, Strategy
from tokenswift.types import DraftTree, Step


@dataclass(eq=False)
class FixedTreeStrategy(Strategy):
    """A strategy with trees of fixed widths in every step, as published methods have.

    Args:
        drafters: all drafters; `drafters_for_step` gives those that propose in a step, in order.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        widths: candidates below a node, by its depth; one each is a chain, none is plain decoding.
        option: name and value of the option that sets the widths, for errors.
        rule: see `Strategy`.
        max_passes: draft passes along one path at most; None: one for each depth.

    Attributes:
        nodes: nodes of a full tree, the root included, n-gram branches not.
        max_nodes: nodes of a tree at most: rows that the cache needs beyond the sequence.
    """

    drafters: Sequence[Drafter]
    sampler: Sampler
    coupled: bool
    widths: tuple[int, ...]
    option: tuple[str, object]
    rule: AcceptanceRule = EXACT
    max_passes: int | None = None
    nodes: int = field(init=False)
    _tree: DraftTree | None = field(init=False, default=None)  # the last one

    def __post_init__(self) -> None:
        self.nodes = tree_nodes(self.widths)
        self.max_nodes = self.nodes

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory of the tree's rows and of the drafters (see `memory.needs_of`)."""
        needs = [Need(*self.option, self.nodes * row)]
        for drafter in self.drafters:
            needs += drafter.needs(text, row)
        return needs

    def begin(self, sequence: SequenceState) -> None:
        """Show the drafters the prompt."""
        for drafter in self.drafters:
            drafter.begin(sequence)

    def drafters_for_step(self, sequence: SequenceState) -> Sequence[Drafter]:
        """The drafters that propose in this step."""
        return self.drafters

    def draft(self, sequence: SequenceState) -> DraftTree:
        """The step's tree, at most as deep as tokens are still to come, less the target's own."""
        widths = self.widths
        if sequence.remaining is not None and self.rule.is_exact:  # else drafts change tokens
            widths = widths[: max(0, sequence.remaining - 1)]
        candidates = Candidates(sequence, self.sampler, self.coupled, widths, self.max_passes)
        for drafter in self.drafters_for_step(sequence) if widths else ():
            candidates.ask(drafter)
        sequence.draft_passes += candidates.passes
        tree = candidates.tree
        forbidden = candidates.forbidden(range(1, len(tree)))
        allowed = None  # all of them
        if forbidden:
            allowed = [node for node in range(1, len(tree)) if node not in forbidden]
        draft = tree.build(allowed)
        self._tree = draft
        return draft

    def observe(self, sequence: SequenceState, step: Step, nodes: tuple[int, ...]) -> None:
        """Show the drafters the step's tokens."""
        tokens = list(step.token_ids)
        for drafter in self.drafters:
            drafter.observe(sequence, Outcome(tokens, len(nodes), True, self._tree))
