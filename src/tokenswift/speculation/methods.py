"""The strategies by name: what each is built of, from its options. The methods to compare with, in
`rivals`, are registered here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from tokenswift.config.strategies import (
    AutoOptions,
    MagicDecOptions,
    MedusaOptions,
    MethodOptions,
    TokenSwiftOptions,
    TriForceOptions,
)
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.adaptive import CHAIN as LONGEST
from tokenswift.speculation.adaptive import AdaptiveStrategy
from tokenswift.speculation.drafters.base import Drafter
from tokenswift.speculation.drafters.eagle import EagleDrafter
from tokenswift.speculation.drafters.heads import DEPTH, HeadDrafter
from tokenswift.speculation.drafters.lookup import LENGTH, GrammarDrafter, Ngrams, PromptLookup
from tokenswift.speculation.drafters.occurrences import DryLosses
from tokenswift.speculation.drafters.partial import PartialDrafter, SparseContext
from tokenswift.speculation.drafters.recycle import Outcomes, Recycle
from tokenswift.speculation.eagle.mtp import MtpModel
from tokenswift.speculation.fixed_tree import FixedTreeStrategy
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.resources import Resources
from tokenswift.speculation.rivals.magicdec import magicdec, magicdec_source
from tokenswift.speculation.rivals.medusa import medusa, medusa_source
from tokenswift.speculation.rivals.published import rule_of
from tokenswift.speculation.rivals.triforce import triforce, triforce_source
from tokenswift.speculation.sequence_state import SequenceState, Strategy
from tokenswift.tree import check_tree

Options = TypeVar("Options", bound=MethodOptions)
#: heads that a strategy may use, and its `types.Generation.draft_source`
DraftSource: TypeAlias = tuple[Heads | None, str]


def autoregressive(resources: object, options: object, sampler: Sampler) -> FixedTreeStrategy:
    """Plain decoding: one token per pass, no drafts."""
    return FixedTreeStrategy([], sampler, True, (), ("tree", "1"))


class TokenSwift(FixedTreeStrategy):
    """The paper's method: heads after a pass over the partial cache, and n-grams.

    Raises:
        InputError: tree widths above the vocabulary, or too many nodes.
    """

    def __init__(self, resources: Resources, options: TokenSwiftOptions, sampler: Sampler) -> None:
        target = resources.target
        self.target = target
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
        drafters += free_drafters(sampler, coupled, learnt.outcomes)
    levels = None
    heads = resources.heads
    if heads is not None:
        depth = DEPTH if heads.conditioned else heads.count
        frequent = options.vocabulary == "frequent"
        levels = HeadDrafter(target, resources.packed(heads), frequent, depth)
        if options.draft != "partial":
            drafters.append(levels)
    if _uses_passes(resources, options):
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


def free_drafters(sampler: Sampler, coupled: bool, outcomes: Outcomes) -> list[Drafter]:
    """Prompt lookup and token recycling, which heed DRY where the sampling has it."""
    params = sampler.params
    if not params.dry_multiplier:
        return [PromptLookup(params.window > 0), Recycle(sampler, coupled, outcomes)]
    lookup = PromptLookup(params.window > 0, params.dry_allowed_length)
    dry = DryLosses(params, sampler.rules.breakers, lookup.occurrences)
    return [lookup, Recycle(sampler, coupled, outcomes, dry)]


def _uses_passes(resources: Resources, options: AutoOptions) -> bool:
    """Whether passes over a partial cache draft; with layers that keep a state only if that is
    asked for: few of their layers have entries that a partial cache could leave out."""
    if options.draft == "hidden" or options.cache == "full":
        return False
    return options.draft == "partial" or resources.target.recurrence is None


def _sources(resources: Resources, options: AutoOptions | TokenSwiftOptions) -> list[str]:
    """What ``auto`` and ``tokenswift`` both draft with."""
    passes = options.draft == "partial" or (options.draft == "auto" and options.cache != "full")
    if isinstance(options, AutoOptions):
        passes = _uses_passes(resources, options)
    parts = {
        "heads": resources.heads is not None,
        "partial passes": passes,
        "text": options.ngrams != 0,
    }
    return [name for name, is_used in parts.items() if is_used]


def auto_source(resources: Resources, options: AutoOptions) -> DraftSource:
    """See `Method`."""
    sources = _sources(resources, options)
    if options.draft_model is not None:
        sources.append(f"draft model {resources.draft_models.name(options.draft_model)}")
    if resources.eagle is not None:
        is_own = isinstance(resources.eagle, MtpModel)
        sources.append("MTP" if is_own else f"EAGLE-3 drafter {resources.eagle.name}")
    return resources.heads, ", ".join(sources) or "none"


def tokenswift_source(resources: Resources, options: TokenSwiftOptions) -> DraftSource:
    """See `Method`."""
    return resources.heads, ", ".join(_sources(resources, options)) or "none"


def autoregressive_source(resources: Resources, options: MethodOptions) -> DraftSource:
    """See `Method`."""
    return None, "none"


class Method:
    """A strategy by name: how it is built, and what it drafts from.

    Args:
        kind: the class of its options.
        build: from the model's resources, the options and the choice rule to the strategy.
        draft_source: from the resources and the options to the heads that the strategy may use, and
            its `types.Generation.draft_source`.
    """

    def __init__(
        self,
        kind: type[Options],
        build: Callable[[Resources, Options, Sampler], Strategy],
        draft_source: Callable[[Resources, Options], DraftSource],
    ) -> None:
        def checked(options: MethodOptions) -> Options:
            if not isinstance(options, kind):
                raise TypeError(f"options are {type(options).__name__}; valid: {kind.__name__}")
            return options

        self._build = lambda resources, options, sampler: build(
            resources, checked(options), sampler
        )
        self._draft_source = lambda resources, options: draft_source(resources, checked(options))

    def __call__(self, resources: Resources, options: MethodOptions, sampler: Sampler) -> Strategy:
        """The strategy of one sequence.

        Raises:
            InputError: options that the model does not support.
        """
        return self._build(resources, options, sampler)

    def draft_source(self, resources: Resources, options: MethodOptions) -> DraftSource:
        """The heads that it may use, and its `types.Generation.draft_source`."""
        return self._draft_source(resources, options)


STRATEGIES: dict[str, Method] = {
    "auto": Method(AutoOptions, auto, auto_source),
    "autoregressive": Method(MethodOptions, autoregressive, autoregressive_source),
    "tokenswift": Method(TokenSwiftOptions, TokenSwift, tokenswift_source),
    "medusa": Method(MedusaOptions, medusa, medusa_source),
    "triforce": Method(TriForceOptions, triforce, triforce_source),
    "magicdec": Method(MagicDecOptions, magicdec, magicdec_source),
}


def drafts_from(resources: Resources, strategy: str, options: MethodOptions) -> DraftSource:
    """The heads that a strategy may use, and its `types.Generation.draft_source`."""
    return STRATEGIES[strategy].draft_source(resources, options)
