"""Adaptive drafting: each step drafts what is expected to gain time, by acceptance probability and cost.

Heads and models that are there, repeats of the text and installed drafters propose; which of them do, and
what of it is verified, follows from measured costs (`spec.adaptive`).
"""

from __future__ import annotations

from tokenswift.method_options import AutoOptions
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.adaptive.candidates import CHAIN
from tokenswift.spec.adaptive.recipe import ByChance
from tokenswift.spec.drafters.drafter import Drafter, Setting
from tokenswift.spec.drafters.eagle import EagleDrafter
from tokenswift.spec.drafters.grammar import GrammarDrafter
from tokenswift.spec.drafters.heads import DEPTH, HeadDrafter
from tokenswift.spec.drafters.lookup import PromptLookup
from tokenswift.spec.drafters.model import ModelContext, ModelDrafter
from tokenswift.spec.drafters.partial import PartialDrafter, SparseContext
from tokenswift.spec.drafters.registry import others
from tokenswift.spec.methods.resources import Resources

BUDGET = 1024  # tokens of the partial cache: smaller passes pay earlier
MODEL_BUDGET, MODEL_SINKS = 512, 4  # of a draft model's cache


class Auto(ByChance):
    """All drafters that the model has, each where it gains time.

    Args:
        llm: model, heads, measured costs and draft models.
        options: `method_options.AutoOptions`.
        sampler: the target's choice rule, shared for coupled candidates.
    Raises:
        InputError: the draft model cannot be had, or the file for explanations cannot be written.
    """

    name = "auto"

    def __init__(self, llm: Resources, options: AutoOptions, sampler: Sampler) -> None:
        target, heads, coupled = llm.target, llm.heads, options.candidates == "coupled"
        drafters: list[Drafter] = [] if sampler.masks is None else [GrammarDrafter(sampler.masks)]
        if options.ngrams != 0:
            drafters.append(PromptLookup(sampler.params.window > 0))
        levels = None
        if heads is not None:
            depth = DEPTH if heads.conditioned else heads.count
            levels = HeadDrafter(target, heads, options.vocabulary == "frequent", depth)
            drafters += [levels] if options.draft != "partial" else []
        if options.draft != "hidden" and options.cache != "full":
            budget, frozen = options.budget or max(BUDGET, options.sinks + 1), options.cache == "partial"
            context = SparseContext(target, "important", budget, options.sinks, CHAIN + 1, frozen=frozen)
            drafters.append(PartialDrafter(target, context, levels, least=context.budget))
        if options.draft_model is not None:
            small = llm.draft_models.get(options.draft_model)
            own = ModelContext(
                small, llm.target.vocab_size, "streaming", MODEL_BUDGET, MODEL_SINKS, CHAIN, llm.frequent()
            )
            drafters.append(ModelDrafter(own, target, ("draft_model", "given")))
        if llm.eagle is not None:
            drafters.append(EagleDrafter(llm.eagle))
        drafters += [drafter(Setting(target, sampler, coupled)) for drafter in others()]
        priors = None if heads is None else heads.calibration
        super().__init__(drafters, sampler, coupled, llm.costs, llm.learn_costs, priors, options.explain)
