"""The strategies by name: what each is built of, from its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.config.strategies import (
    AutoOptions,
    MagicDecOptions,
    MedusaOptions,
    TokenSwiftOptions,
    TriForceOptions,
    tree_nodes,
)
from tokenswift.loader.default_model import rivals_note
from tokenswift.memory import Need
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.adaptive import CHAIN as LONGEST
from tokenswift.speculation.adaptive import AdaptiveStrategy
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.drafters.eagle import EagleDrafter
from tokenswift.speculation.drafters.heads import DEPTH, HeadDrafter
from tokenswift.speculation.drafters.lookup import LENGTH, GrammarDrafter, Ngrams, PromptLookup
from tokenswift.speculation.drafters.passes import (
    ModelContext,
    ModelDrafter,
    PartialDrafter,
    SparseContext,
    TwoLevelDrafter,
)
from tokenswift.speculation.drafters.recycle import Recycle
from tokenswift.speculation.heads import Heads
from tokenswift.speculation.resources import Resources
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.tree import check_tree
from tokenswift.types import DraftTree, InputError, Step


@dataclass(eq=False)
class FixedTreeStrategy:
    """A strategy with trees of fixed widths in every step, as published methods have.

    Args:
        drafters: all drafters; `asked` gives those that propose in a step, in order.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        widths: candidates below a node, by its depth; one each is a chain, none is plain decoding.
        option: name and value of the option that sets the widths, for errors.
        acceptance: the rule, "exact" or "published".
        max_passes: draft passes along one path at most; None: one for each depth.

    Attributes:
        nodes: nodes of a full tree, the root included, n-gram branches not.
        max_nodes: nodes of a tree at most: rows that the cache needs beyond the sequence.
    """

    drafters: Sequence[Drafter]
    sampler: Sampler
    coupled: bool
    widths: tuple[int, ...]
    option: tuple[str, object]
    acceptance: str = "exact"
    max_passes: int | None = None

    def __post_init__(self) -> None:
        self.nodes = self.max_nodes = tree_nodes(self.widths)

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory of the tree's rows and of the drafters (see `memory.needs_of`)."""
        own = Need(*self.option, self.nodes * row)
        return [own, *(need for drafter in self.drafters for need in drafter.needs(text, row))]

    def begin(self, sequence: SequenceState) -> None:
        """Show the drafters the prompt."""
        for drafter in self.drafters:
            drafter.begin(sequence)

    def asked(self, sequence: SequenceState) -> Sequence[Drafter]:
        """The drafters that propose in this step."""
        return self.drafters

    def draft(self, sequence: SequenceState) -> DraftTree:
        """The step's tree, at most as deep as tokens are still to come, less the target's own."""
        widths, remaining = self.widths, sequence.remaining
        if (
            remaining is not None and self.acceptance == "exact"
        ):  # by the published rule drafts change tokens
            widths = widths[: max(0, remaining - 1)]
        candidates = Candidates(sequence, self.sampler, self.coupled, widths, self.max_passes)
        for drafter in self.asked(sequence) if widths else ():
            candidates.ask(drafter)
        sequence.draft_passes += candidates.passes
        tree = candidates.tree
        out = candidates.forbidden(range(1, len(tree)))
        self.tree = tree.build([n for n in range(1, len(tree)) if n not in out] if out else None)
        return self.tree

    def observe(self, sequence: SequenceState, step: Step, nodes: tuple[int, ...]) -> None:
        """Show the drafters the step's tokens."""
        tokens = list(step.token_ids)
        for drafter in self.drafters:
            drafter.observe(sequence, Outcome(tokens, len(nodes), True, self.tree))

    def report(self) -> dict[str, Any] | None:
        """None: there were no decisions."""
        return None


def autoregressive(llm: Any, options: Any, sampler: Sampler) -> FixedTreeStrategy:
    """Plain decoding: one token per pass, no drafts."""
    return FixedTreeStrategy([], sampler, True, (), ("tree", "1"))


def medusa(llm: Resources, options: MedusaOptions, sampler: Sampler) -> FixedTreeStrategy:
    """Medusa: a tree from parallel heads on the last hidden state.

    Raises:
        InputError: no heads of kind "medusa", tree widths above the vocabulary, or too many nodes.
    """
    heads, tree = llm.heads_of("medusa"), options.tree
    if heads is None:
        raise InputError(
            "strategy medusa needs heads of kind medusa for this model; valid: --heads FILE from "
            f"tokenswift train --kind medusa{rivals_note()}"
        )
    check_tree(tree, llm.target.vocab_size)
    drafter = HeadDrafter(llm.target, llm.packed(heads), options.vocabulary == "frequent")
    coupled = options.candidates == "coupled"
    return FixedTreeStrategy([drafter], sampler, coupled, tree, ("tree", tree), options.acceptance)


class TokenSwift(FixedTreeStrategy):
    """The paper's method: heads after a pass over the partial cache, and n-grams.

    Raises:
        InputError: tree widths above the vocabulary, or too many nodes.
    """

    def __init__(self, llm: Resources, options: TokenSwiftOptions, sampler: Sampler) -> None:
        target, coupled = llm.target, options.candidates == "coupled"
        tree, self.target, self.mode = options.tree, llm.target, options.draft
        check_tree(tree, target.vocab_size)
        self.budget = options.budget
        heads, frequent = llm.heads, options.vocabulary == "frequent"
        self.heads = [] if heads is None else [HeadDrafter(target, llm.packed(heads), frequent)]
        context, frozen = None, options.cache == "partial"
        if options.cache != "full":
            context = SparseContext(
                target, "important", self.budget, options.sinks, 1, frozen=frozen
            )
        self.partial = PartialDrafter(
            target, context, next(iter(self.heads), None), least=self.budget
        )
        count = options.ngrams
        self.ngrams = [Ngrams(count, options.ngram_count, sampler, coupled)] if count else []
        drafters = [*self.heads, *([] if self.mode == "hidden" else [self.partial]), *self.ngrams]
        super().__init__(
            drafters, sampler, coupled, tree, ("tree", tree), options.acceptance, max_passes=1
        )
        self.max_nodes += count * LENGTH

    def asked(self, sequence: SequenceState) -> list[Drafter]:
        """The paper's Algorithm 1, lines 4 to 7: the drafter of the tree, then the n-grams."""
        total = sequence.cache.length
        pays = total > self.budget and total * self.target.kv_bytes > self.target.weight_bytes
        passes = self.mode == "partial" or (self.mode == "auto" and pays)
        if passes and sequence.last_pass is not None:
            return [self.partial, *self.ngrams]
        return [*self.heads, *self.ngrams]


def small_model(
    llm: Resources,
    name: Any,
    option: tuple[str, Any],
    size: int,
    sinks: int,
    longest: int,
    kv: str = "streaming",
) -> ModelDrafter:
    """A draft model over a cache of ``size`` tokens that drafts up to ``longest``; ``option``: name
    and value of the option that sets the size, for errors."""
    target, model = llm.target, llm.draft_models.get(name)
    frequent = None if llm.heads is None else llm.heads.frequent
    context = ModelContext(model, target.vocab_size, kv, size, sinks, longest, frequent)
    return ModelDrafter(context, target, option)


def triforce(llm: Resources, options: TriForceOptions, sampler: Sampler) -> FixedTreeStrategy:
    """TriForce: a chain of at least γ tokens by a draft model and the target over a retrieved
    cache.

    Raises:
        InputError: the draft model cannot be had.
    """
    gamma, sinks, longest = options.gamma, options.sinks, options.gamma + options.inner_gamma
    option = ("draft_budget", options.draft_budget)
    inner = small_model(llm, options.draft_model, option, options.draft_budget, sinks, longest)
    sizes = (options.budget, sinks, longest + 1, options.refresh)
    context = SparseContext(llm.target, "chunks", *sizes, chunk=options.chunk)
    drafter = TwoLevelDrafter(context, inner, options.inner_gamma, gamma)
    coupled, widths = options.candidates == "coupled", (1,) * (gamma + 1)
    return FixedTreeStrategy([drafter], sampler, coupled, widths, ("gamma", gamma))


def magicdec(llm: Resources, options: MagicDecOptions, sampler: Sampler) -> FixedTreeStrategy:
    """MagicDec: a chain of γ tokens by a draft model, or by the target itself over a sparse cache.

    Raises:
        InputError: the draft model cannot be had.
    """
    budget, sinks, gamma, kv = options.budget, options.sinks, options.gamma, options.kv
    if options.draft_model is None:
        policy, refresh = ("snapkv", 0) if kv == "snapkv" else ("recent", None)
        context = SparseContext(llm.target, policy, budget, sinks, gamma, refresh)
        drafter: Drafter = PartialDrafter(llm.target, context, source="chain")
    else:
        drafter = small_model(
            llm, options.draft_model, ("budget", budget), budget, sinks, gamma, kv
        )
    coupled, widths = options.candidates == "coupled", (1,) * gamma
    return FixedTreeStrategy([drafter], sampler, coupled, widths, ("gamma", gamma))


# tokens of the partial cache; smaller than the paper's, so that it pays at shorter contexts
BUDGET = 1024
MODEL_BUDGET, MODEL_SINKS = 512, 4  # tokens of a draft model's cache, and sinks among them


def auto(llm: Resources, options: AutoOptions, sampler: Sampler) -> AdaptiveStrategy:
    """Adaptive drafting with all drafters that the model has.

    Raises:
        InputError: the draft model cannot be had.
    """
    target, heads, coupled = llm.target, llm.heads, options.candidates == "coupled"
    drafters: list[Drafter] = [] if sampler.masks is None else [GrammarDrafter(sampler.masks)]
    if options.ngrams != 0:
        drafters.append(PromptLookup(sampler.params.window > 0))
        drafters.append(Recycle(sampler, coupled, llm.learnt().outcomes))
    levels = None
    if heads is not None:
        depth = DEPTH if heads.conditioned else heads.count
        levels = HeadDrafter(target, llm.packed(heads), options.vocabulary == "frequent", depth)
        drafters += [levels] if options.draft != "partial" else []
    if options.draft != "hidden" and options.cache != "full":
        budget, frozen = (
            options.budget or max(BUDGET, options.sinks + 1),
            options.cache == "partial",
        )
        context = SparseContext(
            target, "important", budget, options.sinks, LONGEST + 1, frozen=frozen
        )
        drafters.append(PartialDrafter(target, context, levels, least=context.budget))
    if options.draft_model is not None:
        option = ("draft_model", "given")
        drafters.append(
            small_model(llm, options.draft_model, option, MODEL_BUDGET, MODEL_SINKS, LONGEST)
        )
    if llm.eagle is not None:
        drafters.append(EagleDrafter(llm.eagle))
    return AdaptiveStrategy(drafters, sampler, coupled, llm.learnt())


#: builders of the strategies, from the model's resources, the strategy's options and the choice
#: rule
STRATEGIES: dict[str, Callable[[Resources, Any, Sampler], FixedTreeStrategy | AdaptiveStrategy]] = {
    "auto": auto,
    "autoregressive": autoregressive,
    "tokenswift": TokenSwift,
    "medusa": medusa,
    "triforce": triforce,
    "magicdec": magicdec,
}


def drafts_from(llm: Resources, strategy: str, options: Any) -> tuple[Heads | None, str]:
    """The heads that a strategy may use, and its `types.Generation.draft_source`."""
    if strategy in ("auto", "tokenswift"):
        heads = llm.heads
        partial = options.draft != "hidden" and (
            options.draft == "partial" or options.cache != "full"
        )
        parts = {"heads": heads is not None, "partial passes": partial, "text": options.ngrams != 0}
        if strategy == "auto":
            if options.draft_model is not None:
                parts[f"draft model {llm.draft_models.name(options.draft_model)}"] = True
            if llm.eagle is not None:
                parts[f"EAGLE-3 drafter {llm.eagle.name}"] = True
        return heads, ", ".join(name for name, there in parts.items() if there) or "none"
    if strategy == "medusa":
        return llm.heads_of("medusa"), "heads"
    if strategy == "triforce" or (strategy == "magicdec" and options.draft_model is not None):
        return None, f"draft model {llm.draft_models.name(options.draft_model)}"
    return None, "partial passes" if strategy == "magicdec" else "none"
