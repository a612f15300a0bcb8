"""TriForce (Sun et al. 2024): speculation in two levels. A draft model drafts for the target over a
retrieved part of its cache, and that drafts for the target over the full cache.
"""

from __future__ import annotations

import torch

from tokenswift.config.strategies import TriForceOptions
from tokenswift.kv.sparse import SparseCache
from tokenswift.memory import Need
from tokenswift.sampling.masks import NoMask
from tokenswift.sampling.sampler import RefusedRow, Sampler
from tokenswift.speculation.accept import accept_exact
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.drafters.partial import SparseContext
from tokenswift.speculation.fixed_tree import FixedTreeStrategy
from tokenswift.speculation.resources import Resources
from tokenswift.speculation.sequence_state import SequenceState


class TwoLevelDrafter(Drafter):
    """Drafts a chain by speculation: an inner drafter drafts, and the target over its partial cache
    verifies.

    Args:
        context: the target's partial cache.
        inner: the inner drafter.
        step: tokens that ``inner`` drafts at a time.
        goal: tokens of the chain; one more at most, fewer after invalid logits or where the tree is
            full.
    """

    name = "checked"
    source = "chain"

    def __init__(self, context: SparseContext, inner: Drafter, step: int, goal: int) -> None:
        self.context = context
        self.inner = inner
        self.step = step
        self.goal = goal

    def needs(self, text: int, row: int) -> list[Need]:
        """Both caches."""
        return [self.context.need(), *self.inner.needs(text, row)]

    def begin(self, sequence: SequenceState) -> None:
        """Show the inner drafter the prompt."""
        self.inner.begin(sequence)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """A chain, made part by part."""
        if sequence.last_pass is None:
            return
        chain: list[int] = []
        cache = self.context.cache(sequence, candidates)
        room = len(candidates.widths)
        goal = min(self.goal, room)
        while len(chain) < goal:
            part = self._part(sequence, candidates, cache, chain, goal)
            if not part:
                break
            chain += part
        node = 0
        for token in chain[:room]:
            node = candidates.add(node, token)

    def _part(
        self,
        sequence: SequenceState,
        candidates: Candidates,
        cache: SparseCache,
        chain: list[int],
        goal: int,
    ) -> list[int]:
        """The next tokens of the chain: drafted, verified over the partial cache, and accepted by
        the exact rule; empty after invalid logits."""
        text = sequence.tokens
        sampler = candidates.sampler
        widths = (1,) * min(self.step, goal - len(chain))
        inner = Candidates(sequence, sampler, candidates.coupled, widths, ahead=chain)
        inner.ask(self.inner)
        tree = inner.tree.build()
        tokens = torch.tensor(tree.tokens)
        positions = torch.tensor(tree.depths) + len(text) + len(chain) - 1
        result = self.context.model.forward(tokens, positions, cache)
        logits = self.context.model.logits(result.hidden)
        candidates.passes += 1
        try:
            accepted = accept_exact(
                tree, logits, text, sampler, all_rows=not sampler.row_by_row, ahead=chain
            )
        except (RefusedRow, NoMask):  # on a drafted path, which the target may never take
            return []
        cache.grow(len(accepted.nodes))
        return [*(tree.tokens[node] for node in accepted.nodes[1:]), accepted.token]

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Append the step's tokens to both caches."""
        self.inner.observe(sequence, outcome)
        self.context.observe(sequence, outcome.nodes)


def triforce(resources: Resources, options: TriForceOptions, sampler: Sampler) -> FixedTreeStrategy:
    """TriForce: a chain of at least γ tokens by a draft model and the target over a retrieved
    cache.

    Raises:
        InputError: the draft model cannot be had.
    """
    gamma = options.gamma
    longest = gamma + options.inner_gamma
    inner = resources.small_model(
        options.draft_model,
        ("draft_budget", options.draft_budget),
        size=options.draft_budget,
        sinks=options.sinks,
        longest=longest,
    )
    context = SparseContext(
        resources.target,
        "chunks",
        options.budget,
        options.sinks,
        scratch=longest + 1,
        refresh=options.refresh,
        chunk=options.chunk,
    )
    drafter = TwoLevelDrafter(context, inner, options.inner_gamma, gamma)
    coupled = options.candidates == "coupled"
    return FixedTreeStrategy([drafter], sampler, coupled, (1,) * (gamma + 1), ("gamma", gamma))


def triforce_source(resources: Resources, options: TriForceOptions) -> tuple[None, str]:
    """See `methods.Method`."""
    return None, f"draft model {resources.draft_models.name(options.draft_model)}"
