"""Medusa (Cai et al. 2024): parallel heads on the last verified hidden state, a tree over the full cache.

No extra pass: head i drafts the i-th token after the root, all from the state that the verify pass left
for the newest committed token.
"""

from __future__ import annotations

from tokenswift.config import MedusaOptions
from tokenswift.drafters.heads import HeadTree, newest_hidden
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import DraftModel, Sequence
from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.tree import TreeBuilder, check_tree, tree_nodes
from tokenswift.types import DraftTree, Step


class Medusa:
    """Medusa's drafting under the exact acceptance rule.

    Args:
        options: `config.MedusaOptions`, with ``tree`` resolved (not None).
        model: the target.
        heads: heads of kind "medusa".
        sampler: the target's choice rule, shared for coupled candidates.
    Raises:
        InputError: for tree widths above the vocabulary, or too many nodes.
    """

    name = "medusa"

    def __init__(self, options: MedusaOptions, model: DraftModel, heads: Heads, sampler: Sampler) -> None:
        if options.tree is None:
            raise ValueError("the tree must be resolved before the strategy is built")
        check_tree(options.tree, model.vocab_size)
        self.acceptance = options.acceptance
        self.tree: tuple[int, ...] = options.tree
        self.max_nodes = tree_nodes(options.tree)
        frequent = options.vocabulary == "frequent"
        coupled = options.candidates == "coupled"
        self.grower = HeadTree(model, heads, sampler, options.tree, coupled, frequent)

    def needs(self, text: int, row: int) -> list[Need]:
        """The tree's rows (see `memory.Planned`)."""
        return [Need("tree", self.tree, self.max_nodes * row)]

    def begin(self, sequence: Sequence) -> None:
        """Settle which tokens the heads may draft."""
        self.grower.begin(sequence.tokens)

    def draft(self, sequence: Sequence) -> DraftTree:
        """The heads' best tokens, level by level."""
        builder = TreeBuilder(sequence.tokens[-1])
        gamma = 0
        if sequence.newest is not None:
            gamma = self.grower.grow(builder, sequence, newest_hidden(sequence), backbone=False)
        return builder.build(gamma)

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Nothing to learn."""
