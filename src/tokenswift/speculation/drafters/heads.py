"""Drafting with heads, level by level."""

from __future__ import annotations

from torch import Tensor

from tokenswift.kv.memory import to_device
from tokenswift.models.base import BaseTarget
from tokenswift.speculation.costs import FIRST_COST, CostEstimate, Costs
from tokenswift.speculation.drafters.base import Candidates, Drafter, DraftVocabulary
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.sequence_state import SequenceState

HIDDEN = "hidden"
DEPTH = 8  # levels of conditioned heads in adaptive drafting
_WORDS = "heads from the verified state"


class HeadDrafter(Drafter):
    """Drafts with heads: from the hidden state of the last verify pass, or below another drafter's
    passes.

    Heads that see the drafted token before theirs (*conditioned*) run once for each node of a
    level; the others run once for a whole level.

    Args:
        model: the target.
        heads: the draft heads.
        frequent: draft only the heads' frequent tokens and the prompt's.
        depth: levels at most; None: one for each head.
    """

    name = HIDDEN
    source = "head"

    def __init__(
        self, model: BaseTarget, heads: Heads, frequent: bool, depth: int | None = None
    ) -> None:
        self.model = model
        self.heads = heads
        self.frequent = frequent
        self.vocabulary = DraftVocabulary(model, model.vocab_size)
        self.depth = heads.count if depth is None else depth
        self._begun: SequenceState | None = None

    def begin(self, sequence: SequenceState) -> None:
        """Determine the draft vocabulary from the prompt, once for a sequence."""
        if self._begun is not sequence:
            self._begun = sequence
            if self.frequent:
                self.vocabulary = DraftVocabulary(
                    self.model, self.model.vocab_size, self.heads.frequent, sequence.tokens
                )

    def estimate(self, costs: Costs) -> CostEstimate:
        """A tree of one candidate or of two, whichever pays better."""
        estimates = [
            CostEstimate(_WORDS, tokens=1.4, rows=2, draft_cost=1.5 * FIRST_COST),
            CostEstimate(_WORDS, tokens=1.5, rows=3, draft_cost=2 * FIRST_COST),
        ]
        return max(
            estimates, key=lambda one: one.tokens / (one.draft_cost + costs.verify(one.rows))
        )

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add levels below the root."""
        if sequence.last_pass is not None:
            self.grow(candidates, [0], sequence.last_pass.hidden[sequence.last_row][None], HIDDEN)

    def grow(self, candidates: Candidates, nodes: list[int], base: Tensor, kind: str) -> None:
        """Add levels below ``nodes``, from the hidden state ``base`` (1, D), as far as they pay."""
        model = self.model
        heads = self.heads
        states = base
        if heads.conditioned:
            states = states.expand(len(nodes), -1)
        for level in range(self.depth):
            if not nodes:
                break
            embeds = None
            if heads.conditioned:
                tokens = [candidates.tree.tokens[node] for node in nodes]
                embeds = model.embed(to_device(tokens, model.device))
            states = heads.advance(level, states, base.expand(len(states), -1), embeds)
            logits = self.vocabulary.project(heads.normed(level, states))
            rankings = candidates.rank(nodes, logits, level, self.vocabulary.subset, kind)
            next_nodes = candidates.next_level(rankings, level)
            if heads.conditioned:
                rows = {node: row for row, node in enumerate(nodes)}
                parents = [rows[candidates.tree.parents[node]] for node in next_nodes]
                states = states[to_device(parents, states.device)]
            nodes = next_nodes
