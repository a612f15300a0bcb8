"""TriForce (Sun et al. 2024): two levels of speculation.

A small model with a streaming cache drafts for the target over a retrieved partial cache; what that
accepts, by the same exact rule, is the draft for the target over the full cache. Retrieval takes whole
chunks by the product of the newest query with a chunk's mean key, and is repeated while the text grows
(the starred version of the TokenSwift paper) unless ``refresh`` is 0.
"""

from __future__ import annotations

from tokenswift.method_options import TriForceOptions
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.drafters.checked import CheckedDrafter
from tokenswift.spec.drafters.model import ModelContext, ModelDrafter
from tokenswift.spec.drafters.partial import SparseContext
from tokenswift.spec.drafters.recipe import FixedWidths
from tokenswift.spec.methods.resources import Resources


class TriForce(FixedWidths):
    """TriForce's drafting: a chain of at least γ tokens.

    Args:
        llm: model and draft model.
        options: `method_options.TriForceOptions`.
        sampler: the target's choice rule, shared by both levels.
    Raises:
        InputError: the draft model cannot be had.
    """

    name = "triforce"

    def __init__(self, llm: Resources, options: TriForceOptions, sampler: Sampler) -> None:
        gamma, sinks, size = options.gamma, options.sinks, options.draft_budget
        longest, coupled = gamma + options.inner_gamma, options.candidates == "coupled"
        small = llm.draft_models.get(options.draft_model)
        own = ModelContext(small, llm.target.vocab_size, "streaming", size, sinks, longest, llm.frequent())
        inner = ModelDrafter(own, llm.target, ("draft_budget", size))
        context = SparseContext(
            llm.target, "chunks", options.budget, sinks, longest + 1, options.refresh, chunk=options.chunk
        )
        drafter = CheckedDrafter(llm.target, context, inner, sampler, options.inner_gamma, gamma)
        super().__init__([drafter], sampler, coupled, (1,) * (gamma + 1), ("gamma", gamma))
