"""The strategies by name: what each is built of, from its options. The methods to compare with, in
`rivals`, are registered here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenswift.config.strategies import (
    AutoOptions,
    MethodOptions,
    TokenSwiftOptions,
)
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.adaptive import CHAIN as LONGEST
from tokenswift.speculation.adaptive import AdaptiveStrategy
from tokenswift.speculation.drafters.base import Drafter
from tokenswift.speculation.drafters.eagle import EagleDrafter
from tokenswift.speculation.drafters.heads import DEPTH, HeadDrafter
from tokenswift.speculation.drafters.lookup import LENGTH, GrammarDrafter, Ngrams, PromptLookup
from tokenswift.speculation.drafters.partial import PartialDrafter, SparseContext
from tokenswift.speculation.drafters.recycle import Recycle
from tokenswift.speculation.fixed_tree import FixedTreeStrategy
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.resources import Resources
from tokenswift.speculation.rivals.magicdec import magicdec, magicdec_source
from tokenswift.speculation.rivals.medusa import medusa, medusa_source
from tokenswift.speculation.rivals.published import rule_of
from tokenswift.speculation.rivals.triforce import triforce, triforce_source
from tokenswift.speculation.sequence_state import SequenceState, Strategy
from tokenswift.tree import check_tree


def autoregressive(resources: object, options: object, sampler: Sampler) -> FixedTreeStrategy:
    """Plain decoding: one token per pass, no drafts."""
    return FixedTreeStrategy([], sampler, True, (), ("tree", "1"))


class TokenSwift(FixedTreeStrategy):
    """The paper's method: heads after a pass over the partial cache, and n-grams.

    Raises:
        InputError: tree widths above the vocabulary, or too many nodes.
    """

    def __init__(self, resources: Resources, options: TokenSwiftOptions, sampler: Sampler) -> None:
        self.target = target = resources.target
        self.mode = options.draft
        self.budget = options.budget
        tree = options.tree
        check_tree(tree, target.vocab_size)
        self.heads: list[HeadDrafter] = []
        if resources.heads is not None:
            heads = resources.packed(resources.heads)
            self.heads = [HeadDrafter(target, heads, options.vocabulary == "frequent")]
        context = None
        if options.cache != "full":
            frozen = options.cache == "partial"
            context = SparseContext(
                target, "important", self.budget, options.sinks, scratch=1, frozen=frozen
            )
        below = self.heads[0] if self.heads else None
        self.partial = PartialDrafter(target, context, below, min_cached=self.budget)
        coupled = options.candidates == "coupled"
        self.ngrams: list[Ngrams] = []
        if options.ngrams:
            self.ngrams = [Ngrams(options.ngrams, options.ngram_count, sampler, coupled)]
        passes = [] if self.mode == "hidden" else [self.partial]
        super().__init__(
            [*self.heads, *passes, *self.ngrams],
            sampler,
            coupled,
            tree,
            ("tree", tree),
            rule_of(options.acceptance),
            max_passes=1,
        )
        self.max_nodes += options.ngrams * LENGTH

    def drafters_for_step(self, sequence: SequenceState) -> list[Drafter]:
        """The paper's Algorithm 1, lines 4 to 7: the drafter of the tree, then the n-grams."""
        total = sequence.cache.length
        pays = total > self.budget and total * self.target.kv_bytes > self.target.weight_bytes
        passes = self.mode == "partial" or (self.mode == "auto" and pays)
        if passes and sequence.last_pass is not None:
            return [self.partial, *self.ngrams]
        return [*self.heads, *self.ngrams]


# tokens of the partial cache; smaller than the paper's, so that it pays at shorter contexts
BUDGET = 1024
MODEL_BUDGET = 512  # tokens of a draft model's cache
MODEL_SINKS = 4  # sinks among them


def auto(resources: Resources, options: AutoOptions, sampler: Sampler) -> AdaptiveStrategy:
    """Adaptive drafting with all drafters that the model has.

    Raises:
        InputError: the draft model cannot be had.
    """
    target = resources.target
    coupled = options.candidates == "coupled"
    learnt = resources.learnt()
    drafters: list[Drafter] = []
    if sampler.masks is not None:
        drafters.append(GrammarDrafter(sampler.masks))
    if options.ngrams != 0:
        drafters.append(PromptLookup(sampler.params.window > 0))
        drafters.append(Recycle(sampler, coupled, learnt.outcomes))
    levels = None
    if (heads := resources.heads) is not None:
        depth = DEPTH if heads.conditioned else heads.count
        frequent = options.vocabulary == "frequent"
        levels = HeadDrafter(target, resources.packed(heads), frequent, depth)
        drafters += [levels] if options.draft != "partial" else []
    if options.draft != "hidden" and options.cache != "full":
        context = SparseContext(
            target,
            "important",
            options.budget or max(BUDGET, options.sinks + 1),
            options.sinks,
            scratch=LONGEST + 1,
            frozen=options.cache == "partial",
        )
        drafters.append(PartialDrafter(target, context, levels, min_cached=context.budget))
    if options.draft_model is not None:
        model = resources.small_model(
            options.draft_model,
            ("draft_model", "given"),
            size=MODEL_BUDGET,
            sinks=MODEL_SINKS,
            longest=LONGEST,
        )
        drafters.append(model)
    if resources.eagle is not None:
        drafters.append(EagleDrafter(resources.eagle))
    return AdaptiveStrategy(drafters, sampler, coupled, learnt)


#: builders of the strategies, from the model's resources, the strategy's options and the choice
#: rule
STRATEGIES: dict[str, Callable[[Resources, Any, Sampler], Strategy]] = {
    "auto": auto,
    "autoregressive": autoregressive,
    "tokenswift": TokenSwift,
    "medusa": medusa,
    "triforce": triforce,
    "magicdec": magicdec,
}


def _sources(resources: Resources, options: AutoOptions | TokenSwiftOptions) -> list[str]:
    """What ``auto`` and ``tokenswift`` both draft with."""
    passes = options.draft == "partial" or (options.draft == "auto" and options.cache != "full")
    parts = {
        "heads": resources.heads is not None,
        "partial passes": passes,
        "text": options.ngrams != 0,
    }
    return [name for name, is_used in parts.items() if is_used]


def auto_source(resources: Resources, options: AutoOptions) -> tuple[Heads | None, str]:
    """See :data:`DRAFT_SOURCES`."""
    sources = _sources(resources, options)
    if options.draft_model is not None:
        sources.append(f"draft model {resources.draft_models.name(options.draft_model)}")
    if resources.eagle is not None:
        sources.append(f"EAGLE-3 drafter {resources.eagle.name}")
    return resources.heads, ", ".join(sources) or "none"


def tokenswift_source(resources: Resources, options: TokenSwiftOptions) -> tuple[Heads | None, str]:
    """See :data:`DRAFT_SOURCES`."""
    return resources.heads, ", ".join(_sources(resources, options)) or "none"


#: by strategy, the heads that it may use and its `types.Generation.draft_source`
DRAFT_SOURCES: dict[str, Callable[[Resources, Any], tuple[Heads | None, str]]] = {
    "auto": auto_source,
    "autoregressive": lambda resources, options: (None, "none"),
    "tokenswift": tokenswift_source,
    "medusa": medusa_source,
    "triforce": triforce_source,
    "magicdec": magicdec_source,
}


def drafts_from(
    resources: Resources, strategy: str, options: MethodOptions
) -> tuple[Heads | None, str]:
    """The heads that a strategy may use, and its `types.Generation.draft_source`."""
    return DRAFT_SOURCES[strategy](resources, options)
