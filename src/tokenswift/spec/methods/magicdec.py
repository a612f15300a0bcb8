"""MagicDec (Chen et al. 2024): a chain drafted over a sparse cache, by the target itself or a small model.

The sparse cache is StreamingLLM's (sinks and a recent window) or SnapKV's (selected at prefill by pooled
attention of an observation window; what is generated replaces its least important part).
"""

from __future__ import annotations

from tokenswift.method_options import MagicDecOptions
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.drafters.drafter import Drafter
from tokenswift.spec.drafters.model import ModelContext, ModelDrafter
from tokenswift.spec.drafters.partial import PartialDrafter, SparseContext
from tokenswift.spec.drafters.recipe import FixedWidths
from tokenswift.spec.drafters.registry import CHAIN
from tokenswift.spec.methods.resources import Resources

POLICIES = {"snapkv": "snapkv", "streaming": "recent"}


class MagicDec(FixedWidths):
    """MagicDec's drafting: a chain of γ tokens.

    Args:
        llm: model and draft model.
        options: `method_options.MagicDecOptions`; without a draft model the target drafts for itself.
        sampler: the target's choice rule, shared for coupled drafting.
    Raises:
        InputError: the draft model cannot be had.
    """

    name = "magicdec"

    def __init__(self, llm: Resources, options: MagicDecOptions, sampler: Sampler) -> None:
        budget, sinks, gamma = options.budget, options.sinks, options.gamma
        drafter: Drafter
        if options.draft_model is None:
            refresh = 0 if options.kv == "snapkv" else None
            context = SparseContext(llm.target, POLICIES[options.kv], budget, sinks, gamma, refresh)
            drafter = PartialDrafter(llm.target, context, mark=CHAIN)
        else:
            small = llm.draft_models.get(options.draft_model)
            own = ModelContext(small, llm.target.vocab_size, options.kv, budget, sinks, gamma, llm.frequent())
            drafter = ModelDrafter(own, llm.target, ("budget", budget))
        coupled, widths = options.candidates == "coupled", (1,) * gamma
        super().__init__([drafter], sampler, coupled, widths, ("gamma", gamma))
