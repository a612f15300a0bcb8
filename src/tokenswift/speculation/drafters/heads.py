"""Drafting with heads, level by level."""

from __future__ import annotations

from torch import Tensor

from tokenswift.kv.memory import to_device
from tokenswift.models.base import BaseTarget
from tokenswift.speculation.costs import LEVEL, CostEstimate, Costs
from tokenswift.speculation.drafters.base import Candidates, Drafter, DraftVocabulary
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.sequence_state import SequenceState

HIDDEN = "hidden"
DEPTH = 8  # levels of conditioned heads in adaptive drafting


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

    name, source = HIDDEN, "head"

    def __init__(
        self, model: BaseTarget, heads: Heads, frequent: bool, depth: int | None = None
    ) -> None:
        self.model, self.heads, self.frequent = model, heads, frequent
        self.vocabulary = DraftVocabulary(model, model.vocab_size)
        self.depth = heads.count if depth is None else depth
        self._begun: SequenceState | None = None

    def begin(self, sequence: SequenceState) -> None:
        """Determine the draft vocabulary from the prompt, once for a sequence."""
        if self._begun is not sequence:
            self._begun = sequence
            if self.frequent:
                size, frequent = self.model.vocab_size, self.heads.frequent
                self.vocabulary = DraftVocabulary(self.model, size, frequent, sequence.tokens)

    def estimate(self, costs: Costs) -> CostEstimate:
        """A tree of one candidate or of two, whichever pays better."""
        trees = ((1.4, 2, 1.5 * LEVEL), (1.5, 3, 2 * LEVEL))
        best = max(trees, key=lambda tree: tree[0] / (tree[2] + costs.verify(tree[1])))
        return CostEstimate("heads from the verified state", *best)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add levels below the root."""
        if sequence.last_pass is not None:
            self.grow(candidates, [0], sequence.last_pass.hidden[sequence.last_row][None], HIDDEN)

    def grow(self, candidates: Candidates, nodes: list[int], base: Tensor, kind: str) -> None:
        """Add levels below ``nodes``, from the hidden state ``base`` (1, D), as far as they pay."""
        heads, model, states, head = self.heads, self.model, base, 0
        if heads.conditioned:
            states = states.expand(len(nodes), -1)
        while head < self.depth and nodes:
            last = [candidates.tree.tokens[node] for node in nodes[: len(states)]]
            embeds = model.embed(to_device(last, model.device)) if heads.conditioned else None
            states = heads.advance(head, states, base.expand(len(states), -1), embeds)
            logits = self.vocabulary.project(heads.normed(head, states))
            below = candidates.rank(nodes, logits, head, self.vocabulary.subset, kind)
            nodes, rows = candidates.next_level(below, head)
            if heads.conditioned:
                states = states[to_device(rows, states.device)]
            head += 1
