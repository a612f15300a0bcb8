"""Medusa (Cai et al. 2024): a tree from parallel heads on the last hidden state."""

from __future__ import annotations

from tokenswift.config.strategies import MedusaOptions
from tokenswift.loader.default_model import rivals_note
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.drafters.heads import HeadDrafter
from tokenswift.speculation.fixed_tree import FixedTreeStrategy
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.resources import Resources
from tokenswift.speculation.rivals.published import rule_of
from tokenswift.tree import check_tree
from tokenswift.types import InputError


def medusa(resources: Resources, options: MedusaOptions, sampler: Sampler) -> FixedTreeStrategy:
    """Medusa: a tree from parallel heads on the last hidden state.

    Raises:
        InputError: no heads of kind "medusa", tree widths above the vocabulary, or too many nodes.
    """
    heads = resources.heads_of("medusa")
    tree = options.tree
    if heads is None:
        raise InputError(
            "strategy medusa needs heads of kind medusa for this model; valid: --heads FILE from "
            f"tokenswift train --kind medusa{rivals_note()}"
        )
    check_tree(tree, resources.target.vocab_size)
    drafter = HeadDrafter(
        resources.target, resources.packed(heads), options.vocabulary == "frequent"
    )
    coupled = options.candidates == "coupled"
    rule = rule_of(options.acceptance)
    return FixedTreeStrategy([drafter], sampler, coupled, tree, ("tree", tree), rule)


def medusa_source(resources: Resources, options: MedusaOptions) -> tuple[Heads | None, str]:
    """See `methods.Method`."""
    return resources.heads_of("medusa"), "heads"
