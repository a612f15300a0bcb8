"""A strategy as a recipe: drafters, how the tree is formed, and the rule; here with trees of fixed widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenswift.config import tree_nodes
from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.adaptive.estimate import Outcome
from tokenswift.spec.drafters.candidates import Candidates
from tokenswift.spec.drafters.drafter import Drafter
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import DraftTree, Step


class FixedWidths:
    """Drafting of published methods: as many candidates at every depth, in every step.

    Args:
        drafters: all that may be asked; `asked` says which of them a step asks, in order.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        widths: candidates of a place, by its depth.
        option: what sets the widths, and its value, as errors name them.
        acceptance: the rule, "exact" or "published".
        most: passes at most in which a drafter goes along one path; None: one for each depth.
    """

    name = ""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        sampler: Sampler,
        coupled: bool,
        widths: tuple[int, ...],
        option: tuple[str, object],
        acceptance: str = "exact",
        most: int | None = None,
    ) -> None:
        self.drafters, self.sampler, self.coupled = drafters, sampler, coupled
        self.widths, self.option, self.most = widths, option, most
        self.acceptance = acceptance

    @property
    def nodes(self) -> int:
        """Nodes of the widest tree, the root included, without branches."""
        return tree_nodes(self.widths)

    @property
    def max_nodes(self) -> int:
        """Upper bound of a tree's nodes, for the cache's scratch room."""
        return self.nodes

    def needs(self, text: int, row: int) -> list[Need]:
        """The tree's rows, and what the drafters hold (see `memory.Planned`)."""
        own = Need(*self.option, self.nodes * row)
        return [own, *(need for drafter in self.drafters for need in drafter.needs(text, row))]

    def begin(self, sequence: TokenSequence) -> None:
        """Let the drafters read the prompt."""
        for drafter in self.drafters:
            drafter.begin(sequence)

    def asked(self, sequence: TokenSequence) -> Sequence[Drafter]:
        """Who proposes in this step."""
        return self.drafters

    def draft(self, sequence: TokenSequence) -> DraftTree:
        """The step's tree, no deeper than tokens are wanted: the last of them is the target's own."""
        widths, left = self.widths, sequence.left
        if left is not None and self.acceptance == "exact":  # by the published rule drafts change tokens
            widths = widths[: max(0, left - 1)]
        candidates = Candidates(sequence, self.sampler, self.coupled, widths, self.most)
        for drafter in self.asked(sequence) if widths else ():
            candidates.ask(drafter)
        sequence.draft_passes += candidates.passes
        tree, out = candidates.tree, candidates.forbidden()
        if not out:
            return tree.build()
        for node in range(1, len(tree)):
            if tree.parents[node] in out:
                out.add(node)
        return tree.build([node for node in range(1, len(tree)) if node not in out])

    def observe(self, sequence: TokenSequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Let the drafters read on."""
        tokens = list(step.token_ids)
        for drafter in self.drafters:
            outcome = Outcome(tokens, len(nodes), step.times, not drafter.refusals.dropped)
            drafter.observe(sequence, outcome)

    def report(self) -> dict[str, Any] | None:
        """Nothing to account for: it drafts what it is told to."""
        return None
