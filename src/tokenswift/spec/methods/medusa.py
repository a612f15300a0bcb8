"""Medusa (Cai et al. 2024): parallel heads on the last verified hidden state, a tree over the full cache.

No extra pass: head i drafts the i-th token after the root, all from the state that the verify pass left
for the newest committed token.
"""

from __future__ import annotations

from tokenswift.loader.shipped import where
from tokenswift.method_options import MedusaOptions
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.drafters.heads import HeadDrafter
from tokenswift.spec.drafters.recipe import FixedWidths
from tokenswift.spec.methods.resources import Resources
from tokenswift.tree import check_tree
from tokenswift.types import InputError


class Medusa(FixedWidths):
    """Medusa's drafting.

    Args:
        llm: model and heads.
        options: `method_options.MedusaOptions`.
        sampler: the target's choice rule, shared for coupled candidates.
    Raises:
        InputError: no heads of kind "medusa", tree widths above the vocabulary, or too many nodes.
    """

    name = "medusa"

    def __init__(self, llm: Resources, options: MedusaOptions, sampler: Sampler) -> None:
        heads = llm.heads_of("medusa")
        if heads is None:
            raise InputError(
                "strategy medusa needs heads of kind medusa for this model; valid: --heads FILE from "
                f"tokenswift train-heads --kind medusa or import-heads{where()}"
            )
        tree = options.tree
        check_tree(tree, llm.target.vocab_size)
        drafter = HeadDrafter(llm.target, heads, options.vocabulary == "frequent")
        coupled = options.candidates == "coupled"
        super().__init__([drafter], sampler, coupled, tree, ("tree", tree), options.acceptance)
