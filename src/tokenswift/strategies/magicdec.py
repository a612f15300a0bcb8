"""MagicDec (Chen et al. 2024): a chain drafted over a sparse cache, by the target itself or a small model.

The sparse cache is StreamingLLM's (sinks and a recent window) or SnapKV's (selected at prefill by pooled
attention of an observation window; what is generated replaces its least important part).
"""

from __future__ import annotations

from torch import Tensor

from tokenswift.config import MagicDecOptions
from tokenswift.drafters.chain import ModelDrafter, chain_tree, draft_chain
from tokenswift.drafters.context import SparseContext
from tokenswift.drafters.refusal import pass_source
from tokenswift.drafters.vocabulary import DraftVocabulary
from tokenswift.interfaces import DraftModel, Sequence
from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.types import DraftTree, Step

POLICIES = {"snapkv": "snapkv", "streaming": "recent"}


class MagicDec:
    """MagicDec's drafting under the exact acceptance rule.

    Args:
        options: `config.MagicDecOptions`.
        model: the target.
        draft: the draft model, or None (self-speculation).
        sampler: the target's choice rule, shared for coupled drafting.
        frequent: token ids that a draft model may draft, besides the prompt's; None for all.
    """

    name = "magicdec"
    acceptance = "exact"

    def __init__(
        self,
        options: MagicDecOptions,
        model: DraftModel,
        draft: DraftModel | None,
        sampler: Sampler,
        frequent: Tensor | None = None,
    ) -> None:
        self.model, self.sampler = model, sampler
        self.gamma, self.budget = options.gamma, options.budget
        self.coupled = options.candidates == "coupled"
        self.max_nodes = self.gamma + 1
        self.drafter: ModelDrafter | None = None
        if draft is not None:
            self.drafter = ModelDrafter(
                draft, sampler, options.kv, options.budget, options.sinks, self.gamma, self.coupled, frequent
            )
        self.source = pass_source() if self.drafter is None else self.drafter.source
        refresh = 0 if options.kv == "snapkv" else None
        self.context = SparseContext(
            model, POLICIES[options.kv], options.budget, options.sinks, self.gamma, refresh
        )

    def needs(self, text: int, row: int) -> list[Need]:
        """The chain's rows and the sparse cache (see `memory.Planned`)."""
        if self.drafter is not None:
            held, token = self.drafter.slots, self.drafter.model.kv_bytes
        else:
            held, token = self.context.budget, self.model.kv_bytes
        rows = self.max_nodes * row + self.gamma * token
        return [Need("gamma", self.gamma, rows), Need("budget", self.budget, held * token)]

    def begin(self, sequence: Sequence) -> None:
        """Run the prompt through the draft model, if there is one."""
        if self.drafter is not None:
            self.drafter.begin(sequence.tokens)

    def draft(self, sequence: Sequence) -> DraftTree:
        """A chain of γ tokens."""
        text, refused = sequence.tokens, self.source.refused
        if self.drafter is not None:
            drafted = self.drafter.chain(text, self.gamma)
        elif sequence.newest is None or self.source.dropped:
            drafted = []
        else:
            drafted = draft_chain(
                self.model,
                DraftVocabulary(self.model),
                self.context.cache(sequence),
                self.source,
                self.sampler,
                text,
                text[-1:],
                len(text) - 1,
                self.gamma,
                self.coupled,
            )
        sequence.draft_passes += len(drafted) + self.source.refused - refused
        return chain_tree(text[-1], drafted)

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Keep the drafting cache in step with the text."""
        if self.drafter is not None:
            self.drafter.observe(sequence.tokens)
        elif not self.source.dropped:
            self.context.observe(sequence, len(nodes))
