"""TriForce (Sun et al. 2024): two levels of speculation.

A small model with a streaming cache drafts for the target over a retrieved partial cache; what that
accepts, by the same exact rule, is the draft for the target over the full cache. Retrieval takes whole
chunks by the product of the newest query with a chunk's mean key, and is repeated while the text grows
(the starred version of the TokenSwift paper) unless ``refresh`` is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.cache.sparse import SparseCache
from tokenswift.config import TriForceOptions
from tokenswift.drafters.chain import ModelDrafter, chain_tree
from tokenswift.drafters.context import SparseContext
from tokenswift.drafters.refusal import pass_source
from tokenswift.interfaces import DraftModel, Sequence
from tokenswift.memory import Need
from tokenswift.sampling.accept import accept_exact
from tokenswift.sampling.choice import RefusedRow, Sampler
from tokenswift.types import DraftTree, Step


class TriForce:
    """TriForce's drafting under the exact acceptance rule.

    Args:
        options: `config.TriForceOptions`.
        model: the target.
        draft: the small draft model.
        sampler: the target's choice rule, shared by both levels.
        frequent: token ids that the draft model may draft, besides the prompt's; None for all.
    """

    name = "triforce"
    acceptance = "exact"

    def __init__(
        self,
        options: TriForceOptions,
        model: DraftModel,
        draft: DraftModel,
        sampler: Sampler,
        frequent: Tensor | None = None,
    ) -> None:
        self.model, self.sampler = model, sampler
        self.gamma, self.inner = options.gamma, options.inner_gamma
        self.max_nodes = self.gamma + 2
        coupled = options.candidates == "coupled"
        self.drafter = ModelDrafter(
            draft,
            sampler,
            "streaming",
            options.draft_budget,
            options.sinks,
            self.gamma + self.inner,
            coupled,
            frequent,
        )
        self.source = pass_source()
        self.context = SparseContext(
            model,
            "chunks",
            options.budget,
            options.sinks,
            self.gamma + self.inner + 1,
            options.refresh,
            chunk=options.chunk,
        )

    def needs(self, text: int, row: int) -> list[Need]:
        """The chain's rows and both caches (see `memory.Planned`)."""
        large, small = self.model.kv_bytes, self.drafter.model.kv_bytes
        return [
            Need("gamma", self.gamma, self.max_nodes * row + self.gamma * (large + small)),
            Need("inner_gamma", self.inner, self.inner * (large + small)),
            Need("budget", self.context.budget, self.context.budget * large),
            Need("draft_budget", self.drafter.budget, self.drafter.slots * small),
        ]

    def begin(self, sequence: Sequence) -> None:
        """Run the prompt through the draft model."""
        self.drafter.begin(sequence.tokens)

    def draft(self, sequence: Sequence) -> DraftTree:
        """A chain of at least γ tokens, each accepted by the target over the retrieved cache; shorter where
        a row of one of the two is refused, none once either is left out."""
        root = sequence.tokens[-1]
        chain: list[int] = []
        if sequence.newest is None or self._dropped:
            return chain_tree(root, chain)
        cache = self.context.cache(sequence)
        while len(chain) < self.gamma and not self._dropped:
            more = self._inner_step(sequence, cache, chain, self.gamma - len(chain))
            if not more:
                break
            chain += more
        return chain_tree(root, chain)

    @property
    def _dropped(self) -> bool:
        return self.source.dropped or self.drafter.source.dropped

    def _inner_step(self, sequence: Sequence, cache: SparseCache, chain: list[int], room: int) -> list[int]:
        """The inner level after the text and ``chain``: draft, check over the retrieved cache, keep what
        it chooses itself (nothing where it cannot choose)."""
        text = sequence.tokens
        drafted = self.drafter.chain(text, min(self.inner, room), chain)
        tree = chain_tree(chain[-1] if chain else text[-1], drafted)
        tokens = torch.tensor(tree.tokens, device=self.model.device)
        positions = torch.tensor(tree.depths, device=self.model.device) + len(text) + len(chain) - 1
        result = self.model.forward(tokens, positions, cache)
        logits = self.model.logits(result.hidden)
        all_rows = self.model.device.type == "cuda"
        sequence.draft_passes += 1
        try:
            accepted = accept_exact(tree, logits, text, self.sampler, all_rows, ahead=chain)
        except RefusedRow as error:
            self.source.note(error)
            return []
        cache.grow(len(accepted.nodes))
        return [*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token]

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Keep both drafting caches in step with the text."""
        if not self._dropped:
            self.drafter.observe(sequence.tokens)
            self.context.observe(sequence, len(nodes))
