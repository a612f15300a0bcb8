"""MagicDec (Sadhukhan et al. 2024): a chain by a draft model, or by the target itself over a sparse
cache."""

from __future__ import annotations

from tokenswift.config.strategies import MagicDecOptions
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.drafters.base import Drafter
from tokenswift.speculation.drafters.partial import PartialDrafter, SparseContext
from tokenswift.speculation.fixed_tree import FixedTreeStrategy
from tokenswift.speculation.resources import Resources


def magicdec(resources: Resources, options: MagicDecOptions, sampler: Sampler) -> FixedTreeStrategy:
    """MagicDec: a chain of γ tokens.

    Raises:
        InputError: the draft model cannot be had.
    """
    gamma = options.gamma
    drafter = _drafter(resources, options)
    coupled = options.candidates == "coupled"
    return FixedTreeStrategy([drafter], sampler, coupled, (1,) * gamma, ("gamma", gamma))


def _drafter(resources: Resources, options: MagicDecOptions) -> Drafter:
    budget = options.budget
    if options.draft_model is not None:
        return resources.small_model(
            options.draft_model,
            ("budget", budget),
            size=budget,
            sinks=options.sinks,
            longest=options.gamma,
            kv=options.kv,
        )
    selects_once = options.kv == "snapkv"
    context = SparseContext(
        resources.target,
        "snapkv" if selects_once else "recent",
        budget,
        options.sinks,
        scratch=options.gamma,
        refresh=0 if selects_once else None,
    )
    return PartialDrafter(resources.target, context, source="chain")


def magicdec_source(resources: Resources, options: MagicDecOptions) -> tuple[None, str]:
    """See `methods.Method`."""
    if options.draft_model is None:
        return None, "partial passes"
    return None, f"draft model {resources.draft_models.name(options.draft_model)}"
